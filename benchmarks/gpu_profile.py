"""Where a step of data-parallel training on GPUs spends its time: the part `profile` of benchmarks/gpu.py."""

import contextlib
import copy
import statistics
import time


class Profile:
    """Of a rank of benchmarks/gpu.py, which brings models, wraps and rounds."""

    def profile(self):
        """Where a step's time goes: variants of it, the host time of cdist's parts, the wait of the GPU."""
        torch = self.torch
        for name, (make, inputs, loss) in self.models().items():
            torch.manual_seed(0)
            base = make().cuda()
            buffers = list(base.buffers())
            self.results[f"buffers {name}"] = {
                "tensors": float(len(buffers)),
                "MiB": sum(b.numel() * b.element_size() for b in buffers) / 2**20,
            }
            runs = {kind: self.ready(base, *variant) for kind, variant in self.variants().items()}
            x = inputs()
            times = self.rounds(runs, x, loss, self.args.rounds)
            self.results[f"exposed_ms {name}"] = self.exposed(times)
            medians = {
                kind: [statistics.median(part) for part in zip(*v, strict=True)] for kind, v in times.items()
            }
            self.results[f"host_ms {name} (forward backward optimizer, then until done)"] = {
                kind: " ".join(f"{part:8.3f}" for part in v[1:]) for kind, v in medians.items()
            }
            self.results[f"parts_us {name}"] = self.parts(runs["cdist"], x, loss)
            del runs, base
            torch.cuda.empty_cache()

    def ready(self, base, wrap, quiet, after):
        """Return what `rounds` runs: a wrapped copy, its optimizer, the steps' context, what follows."""
        model = wrap(copy.deepcopy(base))
        context = model.no_sync if quiet else contextlib.nullcontext
        return model, self.torch.optim.SGD(model.parameters(), 1e-4, foreach=True), context, after

    def variants(self):
        """Wraps, and cdist's and torch's with one thing left out or added."""
        torch, cdist = self.torch, self.cdist
        theirs, ours = torch.nn.parallel.DistributedDataParallel, cdist.parallel.DistributedDataParallel

        def of(library, **options):
            options = {"device_ids": [self.rank], "gradient_as_bucket_view": True, **options}
            return lambda m: library(m, **options)

        def hooked(m):
            for p in m.parameters():
                p.register_post_accumulate_grad_hook({}.get)  # the cheapest callable
            return m

        wraps = self.wraps()
        kinds = ["local", "torch", "cdist", "lockstep", "cdist alone", "cdist quiet"]
        return {
            **{kind: wraps[kind] for kind in kinds},
            "empty hooks": (hooked, False, wraps["lockstep"][2]),
            "torch, no buffers": (of(theirs, broadcast_buffers=False), False, None),
            "cdist, no buffers": (of(ours, broadcast_buffers=False), False, None),
            "torch, 100 MiB": (of(theirs, bucket_cap_mb=100), False, None),
            "cdist, 100 MiB": (of(ours, bucket_cap_mb=100), False, None),
            "torch, static": (of(theirs, static_graph=True), False, None),
            "cdist, static": (of(ours, static_graph=True), False, None),
        }

    def parts(self, run, x, loss):
        """Host µs of the parts of cdist's DDP in a step; what the GPU waits at the end; a hook by itself."""
        torch = self.torch
        model, optimizer, context, after = run
        spent, waits = {}, []

        def timed(owner, attribute, name=None):
            function, name = getattr(owner, attribute), name or attribute

            def call(*args, **kwargs):
                start = time.perf_counter_ns()
                try:
                    return function(*args, **kwargs)
                finally:
                    spent[name] = spent.get(name, 0) + (time.perf_counter_ns() - start) / 1e3

            object.__setattr__(owner, attribute, call)

        finish = model._finish

        def marked(*args):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            finish(*args)
            end.record()
            waits.append((begin, end))

        object.__setattr__(model, "_finish", marked)
        for name in ("_sync_buffers", "_buffers_to_sync", "_begin_backward", "_end_backward", "forward"):
            timed(model, name)
        timed(model.module, "forward", "module.forward")
        steps = []
        for _ in range(30):
            spent.clear()
            self.step_ms(model, optimizer, x, loss, 1, context, after)
            steps.append(dict(spent))
        torch.cuda.synchronize()
        row = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        row["GPU: last bucket"] = statistics.median(a.elapsed_time(b) * 1e3 for a, b in waits)
        row["hooks and launches"] = self.hooks_us(model)
        return row

    def hooks_us(self, model):
        """Host µs of all hooks of a backward pass, launches with them, outside of the engine."""
        sync = model._sync
        hooks = [sync.reducer.hook(i, view, True, False) for i, view in enumerate(model._views)]
        calls = [(hooks[i], model._params[i]) for i in sync.order]
        times = []
        for _ in range(20):
            self.torch.cuda.synchronize()
            sync.reducer.begin(1)
            sync.reducer.backward = True
            start = time.perf_counter_ns()
            for hook, parameter in calls:
                hook(parameter)
            times.append((time.perf_counter_ns() - start) / 1e3)
            sync.reducer.backward = False
            sync.finish()
        return statistics.median(times)
