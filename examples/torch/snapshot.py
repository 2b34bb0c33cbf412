"""A trainer that the launcher restarts: it goes on from its last snapshot.

    cdistrun --nproc-per-node 2 --max-restarts 3 examples/torch/snapshot.py 10 2
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torch/snapshot.py 10 2

`--die-at EPOCH` ends a worker in that epoch of the first attempt, to see a restart.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from cdist import destroy_process_group, get_rank, init_process_group
from cdist.elastic.multiprocessing.errors import record
from cdist.nn.parallel import DistributedDataParallel as DDP
from cdist.utils.data.distributed import DistributedSampler
from torch.utils.data import DataLoader, TensorDataset


def ddp_setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        init_process_group(backend="nccl")
    else:
        init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path, die_at):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.die_at = die_at
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=[self.local_rank] if on_gpu else None)

    def _load_snapshot(self, snapshot_path):
        snapshot = torch.load(snapshot_path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        if self.global_rank == 0:
            print(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,
        }
        # Whoever reads finds the old one or the new one, never half of one.
        torch.save(snapshot, self.snapshot_path + ".partial")
        os.replace(self.snapshot_path + ".partial", self.snapshot_path)
        print(f"Epoch {epoch} | training snapshot saved")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        losses = [self._run_batch(x.to(self.device), y.to(self.device)) for x, y in self.train_data]
        if self.global_rank == 0:
            print(f"Epoch {epoch} | steps {len(losses)} | loss on rank 0 {sum(losses) / len(losses):.7f}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            if epoch == self.die_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and get_rank() == 1:
                raise RuntimeError(f"rank 1 was told to die in epoch {epoch}")
            self._run_epoch(epoch)
            if self.global_rank == 0 and (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)


def load_train_objs(samples=512):
    torch.manual_seed(0)
    x = torch.randn(samples, 20)
    train_set = TensorDataset(x, (x[:, :10].sum(1) > x[:, 10:].sum(1)).long())
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    return train_set, model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


@record
def main(options):
    ddp_setup()
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, options.batch_size)
    trainer = Trainer(model, train_data, optimizer, options.save_every, options.snapshot, options.die_at)
    trainer.train(options.total_epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("total_epochs", type=int, help="epochs to train")
    parser.add_argument("save_every", type=int, help="epochs between snapshots")
    parser.add_argument("--batch_size", type=int, default=32, help="samples of a step on each rank")
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--die-at", type=int, default=-1, help="epoch in which rank 1 dies, once")
    main(parser.parse_args())
