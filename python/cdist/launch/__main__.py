"""python -m cdist.launch: cdistrun for scripts of the time of ``python -m torch.distributed.launch``.

The options are those of cdistrun, and ``--use-env``. Without it the script is given ``--local-rank=N`` before
its own arguments; with it the script is to read LOCAL_RANK, as under cdistrun. The environment is the same
either way.
"""

import sys

from cdist.launch.main import main

if __name__ == "__main__":
    sys.exit(main(is_legacy=True))
