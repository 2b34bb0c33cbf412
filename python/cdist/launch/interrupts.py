"""What Ctrl-C leaves of the workers' stderr: the tracebacks of all, much the same, become a line a place."""

import os
import re

# As Python writes them; @: what init_process_group puts before each line. Who was told of another rank's
# interruption before its own came raises that.
_PATTERN = (
    rb"(?:^@(?:Exception ignored [^\n]*|Process [^\n]*:)\n)?"
    rb"^@Traceback \(most recent call last\):\n(?:@(?: [^\n]*)?\n)*"
    rb"@(?:KeyboardInterrupt\b|(?:\w+\.)*(?:PeerLostError|AbortedError): )[^\n]*\n?"
    rb"(?:@\n@(?:During handling of|The above exception was)[^\n]*\n@\n)?"
)
_TRACEBACK = re.compile(_PATTERN.replace(b"@", rb"(?:\[rank\d+\]: )?"), re.MULTILINE)
_FRAME = re.compile(rb'File "([^"\n]+)", line (\d+), in ([^\n]+)')
_PACKAGE = os.fsencode(os.path.dirname(os.path.dirname(__file__)))
_LIBRARIES = re.compile(rb"^<|/(?:site|dist)-packages/|/lib/python\d|^" + re.escape(_PACKAGE) + rb"/")


def without_tracebacks(text):
    """Return the text without tracebacks of interruptions, and where the program was or None.

    A place is "train.py:7 in main": the innermost line that is not of a library.
    """
    place = None
    for found in _TRACEBACK.finditer(text):
        frames = _FRAME.findall(found[0])
        own = [frame for frame in frames if not _LIBRARIES.search(frame[0])] or frames
        if own and place is None:
            path, line, function = (part.decode(errors="replace") for part in own[-1])
            place = f"{os.path.basename(path)}:{line} in {function}"
    return _TRACEBACK.sub(b"", text), place


def summary(places):
    """Return lines that say which ranks were where; `places`: the place of each rank that told one."""
    ranks = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    return "".join(f"cdistrun: {_spans(found)}: {place}\n" for place, found in ranks.items())


def _spans(ranks):
    """Return "rank 3" or "ranks 0-3, 5" for sorted numbers."""
    spans = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(texts)
