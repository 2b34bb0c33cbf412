"""Shims under the paths of torch.utils."""
