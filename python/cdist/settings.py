"""``python -m cdist.settings`` prints the settings as the README's table."""

from cdist import _core


def table():
    """Return the table in Markdown: one row for each environment variable that cdist reads."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, default, meaning in _core.settings():
        rows.append(f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
