"""Post-local SGD."""

from cdist.parallel.hooks import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
