"""What the ranks of a failed job wrote of themselves (CDIST_DUMP_DIR), merged for the launcher's report."""

import contextlib
import os
import signal
import time

# How long ranks that still run are waited for to write where they are.
_PATIENCE = 0.5


class Dumps:
    """The dumps of one attempt."""

    def __init__(self, folder):
        """Use the user's CDIST_DUMP_DIR if it is set, else a folder inside `folder`."""
        self.folder = os.environ.get("CDIST_DUMP_DIR") or os.path.join(folder, "dumps")
        os.makedirs(self.folder, exist_ok=True)
        self._since = time.time() - 1  # a user's folder may hold those of earlier jobs

    def _files(self, ending):
        for name in sorted(os.listdir(self.folder)):
            path = os.path.join(self.folder, name)
            with contextlib.suppress(OSError):
                if name.endswith(ending) and os.stat(path).st_mtime >= self._since:
                    yield path

    def ask(self, groups):
        """Have the ranks in these process groups dump that said that they listen to SIGUSR2."""
        asked = []
        for path in list(self._files(".listens")):
            with contextlib.suppress(OSError, ValueError):
                pid = int(os.path.basename(path).split(".")[0])
                if os.getpgid(pid) in groups:
                    # Its handler sees this and stays silent: the report says it all.
                    os.rename(path, os.path.join(self.folder, f"{pid}.asked"))
                    os.kill(pid, signal.SIGUSR2)
                    asked.append(f"pid{pid}.json")
        end = time.monotonic() + _PATIENCE
        while asked and time.monotonic() < end:
            written = tuple(self._files(".json"))
            asked = [name for name in asked if not any(path.endswith(name) for path in written)]
            time.sleep(0.005)

    def report(self, is_kept):
        """Return the doctor's table as lines, [] if no rank of a group wrote anything.

        Args:
            is_kept: whether the folder stays: then the timeline is put beside the dumps.

        """
        from cdist import doctor

        dumps = doctor.load(list(self._files(".json")))
        if not dumps or dumps[0]["world_size"] == 1:
            return []
        found = doctor.diagnose(dumps)
        lines = ["cdistrun: what the ranks were at:", *doctor.render(found).split("\n")]
        if is_kept:
            path = os.path.join(self.folder, "doctor.html")
            with contextlib.suppress(OSError), open(path, "w") as file:
                file.write(doctor.timeline(dumps, found))
                lines.append(f"cdistrun: timeline: {path}")
        return lines
