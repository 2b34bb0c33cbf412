"""Merges the files of ``cdist.dump()`` into one table and says which rank is at fault, and at which line.

    python -m cdist.doctor DIR [--html FILE]

DIR holds the JSON files that the ranks wrote when a deadline passed (CDIST_DUMP_DIR), on SIGUSR2 or by
``cdist.dump()``.
"""

import argparse
import html
import json
import os
import re
import sys

# The beginnings of a finding, and of the cause that a group keeps of a rank that died of an exception.
_RANK = re.compile(r"^rank (\d+) ")
_LOST = re.compile(r"^rank \d+ was lost: ")
# Exceptions that tell of another rank.
_CONSEQUENCES = ("PeerLostError", "AbortedError", "DistTimeoutError", "MismatchError")

__all__ = ["load", "diagnose", "render", "timeline", "main"]


def load(folder) -> list:
    """Return the dumps in a folder (or in a list of files), the newest of each rank, by rank."""
    if isinstance(folder, (str, os.PathLike)):
        names = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".json")]
    else:
        names = list(folder)
    newest = {}
    for name in names:
        try:
            with open(name) as file:
                found = json.load(file)
        except (OSError, ValueError):
            continue
        if not isinstance(found, dict) or found.get("cdist_dump") != 1:
            continue
        found["file"] = name
        before = newest.get(found["rank"])
        if before is None or before["time"] < found["time"]:
            newest[found["rank"]] = found
    return [newest[rank] for rank in sorted(newest)]


def _where(dump):
    """Return the innermost frame of the main thread outside cdist, as "train.py:33 in step"."""
    if dump.get("failed_at"):
        return dump["failed_at"]
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    for thread in dump["threads"]:
        for frame in thread["stack"]:
            if not frame["file"].startswith(package):
                return f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}"
        break
    return ""


class _Rank:
    """What is known of one rank: by its own dump, or by those of its neighbours."""

    def __init__(self, rank):
        self.rank, self.operations, self.where, self.dump, self.seen, self.pid = (
            rank,
            [],
            "",
            None,
            -1.0,
            None,
        )

    def take(self, record, when):
        if self.dump is None and when > self.seen:
            self.seen, self.operations, self.where = when, record["operations"], record["site"]
            self.pid = record["pid"]

    def newest(self, context):
        """Its newest collective of a group, or None."""
        known = [o for o in self.operations if o["group"] == context and o["sequence"]]
        return max(known, key=lambda o: o["sequence"]) if known else None


def _ranks_of(dumps):
    world = max(dump["world_size"] for dump in dumps)
    ranks = [_Rank(rank) for rank in range(world)]
    for dump in dumps:
        own = ranks[dump["rank"]]
        own.dump, own.operations, own.where, own.pid = dump, dump["operations"], _where(dump), dump["pid"]
    for dump in dumps:
        for record in dump["peers"]:
            if record["rank"] < world:
                ranks[record["rank"]].take(record, dump["time"])
    return ranks


def _groups_of(dumps):
    groups = {}
    for dump in dumps:
        for group in dump["groups"]:
            groups.setdefault(group["context"], group)
    return groups


def _name(operation):
    reduction = f"({operation['reduction']})" if operation["reduction"] else ""
    return f"{operation['operation']}{reduction} of {operation['bytes']} bytes {operation['dtype']}".strip()


def _judge_group(group, ranks, gone):
    """Return findings [(weight, rank, text)] about one group; the heaviest is the cause."""
    members = [ranks[r] for r in group["ranks"] if r < len(ranks)]
    newest = {m.rank: m.newest(group["context"]) for m in members}
    known = {r: o for r, o in newest.items() if o}
    findings = []
    if not known:
        return findings
    front = max(o["sequence"] for o in known.values())
    ahead = [o for o in known.values() if o["sequence"] == front]
    waited_for = next((o for o in ahead if o["state"] in ("running", "queued", "failed")), None)
    label = f"{ahead[0]['operation']} {front}"
    for member in members:
        operation, place = newest[member.rank], f", at {member.where}" if member.where else ""
        if member.rank in gone:
            last = f"; its last operation was {operation['text']} ({operation['state']})" if operation else ""
            findings.append((3, member.rank, f"rank {member.rank} is gone{last}{place}"))
        elif waited_for and (operation is None or operation["sequence"] < front):
            last = (
                f"it last was in {operation['text']} ({operation['state']})"
                if operation
                else "nothing is known of it"
            )
            findings.append((2, member.rank, f"rank {member.rank} is missing from {label}: {last}{place}"))
    kinds = {}
    for rank, operation in known.items():
        if operation["sequence"] == front:
            same = (operation["operation"], operation["dtype"], operation["reduction"], operation["bytes"])
            kinds.setdefault(same, []).append(rank)
    if len(kinds) > 1:
        said = "; ".join(
            f"ranks {who} call {_name(newest[who[0]])}, at {ranks[who[0]].where or '?'}"
            for who in kinds.values()
        )
        odd = min(kinds.values(), key=len)
        findings.append((4, odd[0], f"operation {front} differs: {said}"))
    return findings


def diagnose(dumps) -> dict:
    """Say who is at fault.

    Returns:
        {"verdict": a sentence, "rank": the rank at fault or None, "findings": all sentences,
        "causes": what broke the groups, "ranks": the rows of the table}.

    """
    ranks = _ranks_of(dumps)
    gone = set().union(*(dump["gone"] for dump in dumps)) - {dump["rank"] for dump in dumps}
    findings = []
    for group in _groups_of(dumps).values():
        findings += _judge_group(group, ranks, gone)
    for dump in dumps:
        if "failed_at" in dump and not dump["reason"].startswith(_CONSEQUENCES):
            place = f", at {dump['failed_at']}" if dump["failed_at"] else ""
            text = f"rank {dump['rank']} ended with {dump['reason']}{place}"
            findings.append((6, dump["rank"], text))
        for other, text in dump["known"].items():
            if "process is stopped" in text:
                findings.append((5, int(other), text))
    if any(weight in (3, 6) for weight, _, _ in findings):
        # Who is behind stopped because of those that ended.
        findings = [finding for finding in findings if finding[0] != 2]
    findings.sort(key=lambda finding: (-finding[0], finding[1]))
    causes = [group["broken"] for dump in dumps for group in dump["groups"] if group["broken"]]
    rows = []
    for rank in ranks:
        last = rank.operations[0] if rank.operations else None
        state = (
            "gone" if rank.rank in gone else "dump" if rank.dump else "seen by others" if last else "unknown"
        )
        rows.append(
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "known": state,
                "last": f"{last['text']} {last['state']}" if last else "",
                "where": rank.where,
            }
        )
    unique = list(dict.fromkeys(text for _, _, text in findings))
    verdict = (
        unique[0]
        if unique
        else causes[0]
        if causes
        else "nobody is behind: all ranks are at the same operation"
    )
    return {
        "verdict": verdict,
        "rank": findings[0][1] if findings else None,
        "findings": unique,
        "causes": list(dict.fromkeys(causes)),
        "ranks": rows,
    }


def render(found) -> str:
    """Return the table and the verdict as text."""
    head = ("rank", "pid", "known by", "last operation", "where")
    rows = [(str(r["rank"]), str(r["pid"] or ""), r["known"], r["last"], r["where"]) for r in found["ranks"]]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    verdict, others = found["verdict"], found["findings"][1:]
    # What is said of several ranks alike is said once.
    alike = [text for text in others if _RANK.sub("", text) == _RANK.sub("", verdict)]
    lines += [f"first cause: {text}" for text in found["causes"][:1] if _LOST.sub("", text) not in verdict]
    lines += [f"also: {text}" for text in others[:5] if text not in alike]
    lines.append(f"at fault: {verdict}")
    if alike:
        ranks = ", ".join(_RANK.match(text)[1] for text in alike)
        lines.append(f"the same is true of rank {ranks}")
    return "\n".join(lines)


_STYLE = """body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}
td,th{padding:2px 10px;text-align:left;
border-bottom:1px solid #ddd}.fault{background:#fdd}
.lane{position:relative;height:26px;margin:4px 0 4px 70px;background:#f4f4f4}
.lane b{position:absolute;left:-70px;top:4px}.op{position:absolute;top:3px;
height:20px;min-width:3px;background:#6a9fd8;
overflow:hidden;font-size:11px;white-space:nowrap}.running,.queued{background:#e8a33d}.failed{background:#d9534f}"""


def timeline(dumps, found) -> str:
    """Return an HTML page, without any dependency, with the last operations of each rank over time."""
    lanes, begin, end = [], None, None
    for rank in _ranks_of(dumps):
        source = rank.dump or next(
            (d for d in dumps if any(p["rank"] == rank.rank for p in d["peers"])), None
        )
        if source is None:
            continue
        offset = source["time"] - source["monotonic"]
        bars = []
        for operation in rank.operations[:200]:
            start = (operation["started"] or operation["queued"]) + offset
            stop = operation["done"] + offset if operation["done"] else start
            if operation["state"] in ("running", "queued"):
                stop = source["time"]
            bars.append((start, stop, operation))
            begin, end = min(begin or start, start), max(end or stop, stop)
        lanes.append((rank, bars))
    span = max((end or 1) - (begin or 0), 1e-3)
    parts = [f"<!doctype html><meta charset=utf-8><title>cdist doctor</title><style>{_STYLE}</style>"]
    parts.append(
        f"<h1>{html.escape(found['verdict'])}</h1>"
        "<table><tr><th>rank<th>pid<th>known by<th>last operation<th>where"
    )
    for row in found["ranks"]:
        mark = " class=fault" if row["rank"] == found["rank"] else ""
        cells = "".join(
            f"<td>{html.escape(str(row[key] or ''))}" for key in ("rank", "pid", "known", "last", "where")
        )
        parts.append(f"<tr{mark}>{cells}")
    parts.append(f"</table><p>{span:.3f} seconds from left to right</p>")
    for rank, bars in lanes:
        parts.append(f"<div class=lane><b>rank {rank.rank}</b>")
        for start, stop, operation in bars:
            left, width = 100 * (start - begin) / span, 100 * (stop - start) / span
            title = html.escape(
                f"{operation['text']}: {_name(operation)}, {operation['state']}, {stop - start:.3f} s",
                quote=True,
            )
            parts.append(
                f'<div class="op {operation["state"]}" style="left:{left:.3f}%;width:{width:.3f}%" '
                f'title="{title}">'
                f"{html.escape(operation['text'])}</div>"
            )
        parts.append("</div>")
    return "".join(parts)


def main(arguments=None) -> int:
    """Print the table; return 0, or 2 when there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="python -m cdist.doctor", description="Say from the dumps of a job's ranks who is at fault."
    )
    parser.add_argument("folder", help="where the ranks wrote their dumps (CDIST_DUMP_DIR)")
    parser.add_argument(
        "--html", metavar="FILE", help="write a timeline here (default: doctor.html in the folder)"
    )
    options = parser.parse_args(arguments)
    try:
        dumps = load(options.folder)
    except OSError as error:
        print(f"cdist.doctor: {error}", file=sys.stderr)
        return 2
    if not dumps:
        print(f"cdist.doctor: no dumps in {options.folder}", file=sys.stderr)
        return 2
    found = diagnose(dumps)
    print(render(found))
    path = options.html or os.path.join(options.folder, "doctor.html")
    with open(path, "w") as file:
        file.write(timeline(dumps, found))
    print(f"timeline: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
