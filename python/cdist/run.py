"""python -m cdist.run: the same as cdistrun."""

import sys

from cdist.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
