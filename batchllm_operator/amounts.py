"""Amounts in words: counted nouns, sizes in bytes, speeds, tables of numbers."""

from collections.abc import Collection, Sequence


def counted(number: int, one: str, more: str | None = None) -> str:
    """A number and its noun: `1 shard`, `1,024 shards`; the plural adds an s, or is `more`."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def first_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first texts, and the number of others, such as `a, b and 4 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def byte_size(num_bytes: float) -> str:
    """A size in the decimal unit that fits it, three digits, such as `748 MB`, `1.2 TB`."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:  # 999.5 is shown as 1,000
        size /= 1000
        units.pop(0)
    return "1 byte" if num_bytes == 1 else f"{size:,.3g} {units[0]}"


def token_speed(computed_tokens_per_s: float, output_tokens_per_s: float) -> str:
    """The speed of an engine, without the prompt tokens that it found in its cache."""
    computed, output = f"{computed_tokens_per_s:,.0f}", f"{output_tokens_per_s:,.0f}"
    return f"{computed} computed prompt and {output} output tokens/s"


def text_table(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0,), indent: str = ""
) -> list[str]:
    """Lines of a table; the columns numbered in `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.ljust(width) if idx in left else cell.rjust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def printable(text: str) -> str:
    """Untrusted text without control characters for the terminal, on one line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def clipped(text: str, most: int) -> str:
    """Text of at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
