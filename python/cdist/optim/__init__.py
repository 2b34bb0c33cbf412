"""Optimizers that communicate: ``cdist.optim.PostLocalSGDOptimizer``."""


def __getattr__(name):
    if name == "PostLocalSGDOptimizer":
        from cdist.parallel.post_local_optimizer import PostLocalSGDOptimizer

        return PostLocalSGDOptimizer
    raise AttributeError(f"module 'cdist.optim' has no attribute {name!r}")
