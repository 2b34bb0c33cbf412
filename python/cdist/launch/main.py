"""The commands cdistrun and python -m cdist.launch."""

import sys

from cdist.launch import agent, options


def main(argv=None, is_legacy=False):
    """Run a command line (default: the process' own); returns the exit code, 2 if it is not understood.

    `is_legacy`: it is that of ``python -m torch.distributed.launch``; see cdist.launch.__main__.
    """
    try:
        parsed = options.parse(sys.argv[1:] if argv is None else argv, is_legacy)
        options.check_script(parsed)
    except options.OptionError as error:
        print(f"cdistrun: {error}", file=sys.stderr)
        return 2
    try:
        return agent.run(parsed)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
