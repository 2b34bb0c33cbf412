"""What holds for all tests."""

import signal

# Who is started in the background (nohup, a shell's &) ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
