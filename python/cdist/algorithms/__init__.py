"""Algorithms on top of collectives: joining uneven inputs, communication hooks of DistributedDataParallel."""
