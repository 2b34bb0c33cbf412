"""``cdist.utils.data.distributed``."""
