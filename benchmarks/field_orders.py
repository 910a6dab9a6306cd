"""Orders of fields by row (`prompt.fields`): what they save, and what choosing them takes.

    python -m benchmarks.field_orders                                  # 100,000 rows a table
    python -m benchmarks.field_orders --rows 1000000
    python -m benchmarks.field_orders --rows 5000 --model .models/smollm2   # saved tokens, too

Five made-up tables have the columns of tables in the literature (GGR): reviews of products and of
movies, ratings of beers, metadata of scores, claims with passages. The rules that choose orders
were made with these five; two more, log events and lines of invoices, came afterwards, and nothing
was changed for them. Values depend on each other (a product has one brand) and are skewed (Zipf);
rows stand in random order. A row has

    saved           the share of the fields' text that an earlier row has after the same fields: in
                    the table's order, in the best single order, and in orders by row
    saved_tokens    Eq. 2 of whole prompts for these three, with the model's tokens
    orders          how many there are
    cpu_s_per_million_rows, bytes_per_field    to choose them: hashing included, and the memory

`small` compares orders with the best of all on tables of four to six rows. There are no figures if
what an order saves isn't what it is said to save.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.plan.rows.ordering import choose_orders, with_orders
from batchllm_operator.plan.rows.prompting import Prompter
from batchllm_operator.prefixes import FieldOrders, TokenTable, hash_texts, optimal_saving_ratio
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.spec import JobSpec, parse_spec
from benchmarks.memory import peak_rss_bytes
from benchmarks.provenance import print_last_line, provenance

SEED: Final = 0
BATCH_ROWS: Final = 20_000
NUM_SMALL: Final = 200

Row = tuple[str, ...]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Draw:
    """Columns of texts; the same ones for a seed."""

    def __init__(self, num_rows: int) -> None:
        self.numbers = np.random.default_rng(SEED)
        self.num_rows = num_rows
        self._words = [f"{number:x}" * 2 for number in range(300, 1300)]

    def skewed(self, num: int, exponent: float = 1.0) -> Numbers:
        """Rows' numbers below `num`, as by Zipf: [num_rows]."""
        shares = 1 / np.arange(1, num + 1) ** exponent
        return self.numbers.choice(num, self.num_rows, p=shares / shares.sum())

    def of(self, owners: Numbers, num: int) -> Numbers:
        """A number below `num` for each owner, by row: [num_rows]."""
        return self.numbers.integers(0, num, int(owners.max()) + 1)[owners]

    def texts(self, numbers: Numbers, num_chars: int) -> pa.Array:
        """A text of about `num_chars` for each number, by row."""
        values, places = np.unique(numbers, return_inverse=True)
        words = self.numbers.integers(0, len(self._words), (len(values), max(1, num_chars // 7)))
        texts = [
            " ".join([f"{value}", *(self._words[word] for word in row)])
            for value, row in zip(values.tolist(), words.tolist(), strict=True)
        ]
        return pa.array(texts, pa.large_string()).take(pa.array(places))

    def own(self, num_chars: int) -> pa.Array:
        """Another text for each row."""
        return self.texts(np.arange(self.num_rows), num_chars)


def products(draw: Draw) -> dict[str, pa.Array]:
    item, buyer = draw.skewed(draw.num_rows // 20 + 2), draw.skewed(draw.num_rows // 5 + 2, 0.7)
    brand = draw.of(item, 400)
    return {
        "rating": draw.texts(draw.skewed(5), 1),
        "review": draw.own(250),
        "buyer": draw.texts(buyer, 20),
        "verified": draw.texts(draw.skewed(2), 1),
        "title": draw.texts(item, 80),
        "brand": draw.texts(brand, 12),
        "category": draw.texts(draw.of(brand, 30), 25),
        "description": draw.texts(item, 400),
    }


def movies(draw: Draw) -> dict[str, pa.Array]:
    movie, critic = draw.skewed(draw.num_rows // 60 + 2), draw.skewed(draw.num_rows // 100 + 2)
    return {
        "review": draw.own(130),
        "critic": draw.texts(critic, 18),
        "publisher": draw.texts(draw.of(critic, 200), 20),
        "score": draw.texts(draw.skewed(10), 3),
        "title": draw.texts(movie, 25),
        "synopsis": draw.texts(movie, 300),
        "director": draw.texts(draw.of(movie, 500), 18),
        "genre": draw.texts(draw.of(movie, 20), 20),
    }


def beers(draw: Draw) -> dict[str, pa.Array]:
    beer, user = draw.skewed(draw.num_rows // 30 + 2), draw.skewed(draw.num_rows // 40 + 2)
    ratings = {
        name: draw.texts(draw.skewed(9, 0.8), 1) for name in ("aroma", "look", "palate", "taste")
    }
    return {
        **ratings,
        "user": draw.texts(user, 14),
        "name": draw.texts(beer, 30),
        "brewery": draw.texts(draw.of(beer, 300), 25),
        "style": draw.texts(draw.of(beer, 80), 28),
        "alcohol": draw.texts(draw.of(beer, 60), 4),
    }


def scores(draw: Draw) -> dict[str, pa.Array]:
    composer, artist = draw.skewed(draw.num_rows // 40 + 2), draw.skewed(draw.num_rows // 15 + 2)
    flags = {f"subset_{idx}": draw.texts(draw.skewed(2, 2.0), 1) for idx in range(4)}
    return {
        "path": draw.own(60),
        **flags,
        "license": draw.texts(draw.skewed(5, 2.0), 45),
        "genre": draw.texts(draw.of(composer, 12), 20),
        "composer": draw.texts(composer, 30),
        "artist": draw.texts(artist, 22),
        "tags": draw.texts(draw.skewed(800), 60),
        "tracks": draw.texts(draw.skewed(20), 2),
        "complexity": draw.texts(draw.skewed(4), 1),
    }


def claims(draw: Draw) -> dict[str, pa.Array]:
    num = draw.num_rows // 10 + 2
    passages = {f"passage_{idx}": draw.texts(draw.skewed(num), 500) for idx in range(1, 5)}
    return {"claim": draw.texts(draw.skewed(draw.num_rows // 2 + 2, 0.3), 60), **passages}


def events(draw: Draw) -> dict[str, pa.Array]:
    """Hosts and messages, which are independent, decide most of the columns."""
    host, message = draw.skewed(draw.num_rows // 500 + 20, 0.5), draw.skewed(3000, 1.2)
    service = draw.of(message, 60)
    return {
        "time": draw.own(10),
        "trace": draw.own(20),
        "level": draw.texts(draw.of(message, 4), 1),
        "service": draw.texts(service, 15),
        "version": draw.texts(service * 3 + draw.skewed(3), 8),
        "logger": draw.texts(draw.of(message, 600), 40),
        "host": draw.texts(host, 25),
        "zone": draw.texts(draw.of(host, 9), 10),
        "message": draw.texts(message, 90),
        "stack": pc.if_else(pa.array(message < 1000), "", draw.texts(message, 700)),
        "user": draw.texts(draw.skewed(draw.num_rows // 20 + 2, 0.8), 12),
        "agent": draw.texts(draw.skewed(400), 110),
    }


def invoices(draw: Draw) -> dict[str, pa.Array]:
    """Two hierarchies: line, invoice, customer, city, region; and product, group, class."""
    customer, product = draw.skewed(draw.num_rows // 50 + 2, 0.6), draw.skewed(20_000, 0.8)
    invoice = customer * 40 + draw.numbers.integers(0, 40, draw.num_rows)
    city, group = draw.of(customer, 1500), draw.of(product, 700)
    return {
        "invoice": draw.texts(invoice, 10),
        "date": draw.texts(draw.of(invoice, 365), 4),
        "terms": draw.texts(draw.of(customer, 6), 60),
        "customer": draw.texts(customer, 28),
        "address": draw.texts(customer, 55),
        "city": draw.texts(city, 12),
        "region": draw.texts(draw.of(city, 90), 14),
        "product": draw.texts(product, 45),
        "group": draw.texts(group, 22),
        "class": draw.texts(draw.of(group, 25), 20),
        "price": draw.texts(draw.of(product, 5000), 1),
        "quantity": draw.texts(draw.skewed(50), 1),
        "note": draw.own(35),
    }


TABLES: Final[tuple[Callable[[Draw], dict[str, pa.Array]], ...]] = (
    *(products, movies, beers),
    *(scores, claims, events, invoices),
)


def job(columns: Sequence[str], model: str | None) -> JobSpec:
    fields = {"order": "by_row", "columns": list(columns)}
    fake = {"backend": "fake", "max_model_len": 8192, "extra_args": {"byte_tokens": model is None}}
    spec = {
        "spec_version": 1,
        "name": "job",
        "input": {"uri": "/in", "key": "row_key"},
        "prompt": {"template": "Answer in a word.\n{fields}Answer:", "fields": fields},
        "model": {"path": str(Path(model).absolute()) if model else "none"},
        "output": {"uri": "/out"},
        "engine": fake,
    }
    return parse_spec(spec, source="benchmark")


def measure(number: int, num_rows: int, model: str | None) -> dict[str, Any]:
    """A table's row; in a process of its own, whose peak it reads."""
    columns = TABLES[number](Draw(num_rows))
    spec = job(list(columns), model)
    batches = pa.table(columns).to_batches(max_chunksize=BATCH_ROWS)
    choose_orders(spec, [batches[0].slice(0, 100)])  # compiles
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it holds now
    before = peak_rss_bytes()
    begin = time.process_time()
    orders = choose_orders(spec, batches)
    seconds = time.process_time() - begin
    peak = peak_rss_bytes() - before
    texts = [column.dictionary_encode().indices for column in columns.values()]
    lengths = [
        pc.binary_length(column).to_numpy() + len(f"{name}: \n") for name, column in columns.items()
    ]
    single, given = np.array([orders.single, range(len(columns))], dtype=np.uint8)
    by_order = {
        "by_row": orders.orders,
        "best_single": np.broadcast_to(single, orders.orders.shape),
        "as_given": np.broadcast_to(given, orders.orders.shape),
    }
    rows = np.stack(texts, axis=1), np.stack(lengths, axis=1)
    num_saved = {name: saved(*rows, order) for name, order in by_order.items()}
    if num_saved["by_row"] != orders.num_shared_bytes:
        sys.exit(f"{TABLES[number].__name__}: orders don't save what they say; no figures")
    row = {
        "table": TABLES[number].__name__,
        "num_columns": len(columns),
        "saved": {name: num / orders.num_bytes for name, num in num_saved.items()},
        "orders": orders.num_orders,
        "cpu_s_per_million_rows": seconds * 1e6 / num_rows,
        "bytes_per_field": peak / num_rows / len(columns),
    }
    if model is not None:
        row["saved_tokens"] = {
            name: _saved_tokens(spec, batches, order) for name, order in by_order.items()
        }
    return row


def _saved_tokens(spec: JobSpec, batches: Sequence[pa.RecordBatch], orders: Any) -> float:
    tokenizer = load_tokenizer(spec, "2026-01-31")
    prompter = Prompter(spec, tokenizer, None)
    chosen = FieldOrders(orders, 0, (), 0, 0, 0)
    tables = [prompter.prompts(batch).tokens for batch in with_orders(batches, chosen)]
    tokens = TokenTable.from_lists(t.prompt(idx) for t in tables for idx in range(len(t)))
    return optimal_saving_ratio(tokens, block_size_of(spec), merge=[True])


def saved(texts: Numbers, lengths: Numbers, orders: Any) -> int:
    """Bytes of fields that an earlier row has after the same fields; by definition.

    Args:
        texts: [num_rows, num_fields] the number of each text, which is its own within a field.
        lengths: [num_rows, num_fields].
        orders: [num_rows, num_fields].
    """
    rows, nodes, num_bytes = np.arange(len(texts)), np.zeros(len(texts), np.int64), 0
    size = int(texts.max(initial=0)) + 1
    for fields in orders.T:
        edges = (nodes * len(orders.T) + fields) * size + texts[rows, fields]
        _, firsts, nodes = np.unique(edges, return_index=True, return_inverse=True)
        num_bytes += int(np.delete(lengths[rows, fields], firsts).sum())
    return num_bytes


def most_saved(rows: Sequence[Row], num_fields: int) -> int:
    """What the best orders of all save: every choice of first fields is tried, then of the next."""

    @cache
    def below(part: tuple[int, ...], free: tuple[int, ...]) -> int:
        best = 0
        for firsts in product(free, repeat=len(part)) if len(part) > 1 else ():
            children = defaultdict(list)
            for row, field in zip(part, firsts, strict=True):
                children[field, rows[row][field]].append(row)
            best = max(
                best,
                sum(
                    (len(child) - 1) * len(text.encode())
                    + below(tuple(child), tuple(other for other in free if other != field))
                    for (field, text), child in children.items()
                    if len(child) > 1
                ),
            )
        return best

    return below(tuple(range(len(rows))), tuple(range(num_fields)))


def orders_of(rows: Sequence[Row], num_fields: int) -> FieldOrders:
    """Orders for rows of texts, without labels."""
    hashes = np.empty((num_fields, len(rows)), dtype=np.uint64)
    for field in range(num_fields):
        texts = [row[field].encode() for row in rows]
        ends = np.cumsum([0, *map(len, texts)])
        hashes[field] = hash_texts(ends, np.frombuffer(b"".join(texts), dtype=np.uint8), field)
    lengths = [len(text.encode()) for row in rows for text in row]
    return FieldOrders.of(hashes, np.array(lengths, dtype=np.int32).reshape(len(rows), num_fields))


def some_rows(rng: Random, num_rows: int, num_fields: int) -> list[Row]:
    """Rows of fields with two to four values each, many of which depend on the field before."""
    texts = [
        [f"{field}{value}" * rng.choice([1, 2, 10, 30]) for value in range(rng.choice([2, 3, 4]))]
        for field in range(num_fields)
    ]
    rows = []
    for _ in range(num_rows):
        numbers: list[int] = []
        for field in range(num_fields):
            depends = field and rng.random() < 0.5
            number = 7 * numbers[-1] if depends else rng.randrange(4)
            numbers.append(number % len(texts[field]))
        rows.append(tuple(texts[field][number] for field, number in enumerate(numbers)))
    return rows


def small_tables(num: int) -> dict[str, float]:
    """What orders by row and the best single ones save of what is possible; summed over tables."""
    rng, sums = Random(SEED), defaultdict[str, int](int)
    for _ in range(num):
        num_fields = rng.choice([3, 4])
        rows = some_rows(rng, rng.choice([4, 5, 6] if num_fields == 3 else [4, 5]), num_fields)
        found, best = orders_of(rows, num_fields), most_saved(rows, num_fields)
        sums["by_row"] += found.num_shared_bytes
        sums["best_single"] += found.num_single_bytes
        sums["best"] += best
        sums["as_good"] += found.num_shared_bytes == best
    return {
        "num_tables": num,
        "by_row": sums["by_row"] / sums["best"],
        "best_single": sums["best_single"] / sums["best"],
        "as_good": sums["as_good"] / num,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", help="folder of a model, for its tokenizer")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    if args.rows < 100:
        parser.error("--rows must be at least 100")
    tables = []
    for number in range(len(TABLES)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            tables.append(pool.apply(measure, (number, args.rows, args.model)))
        print(json.dumps(tables[-1]), flush=True)
    report = {
        "benchmark": "field_orders",
        "tables": tables,
        "small": small_tables(NUM_SMALL),
        "seed": SEED,
        "rows": args.rows,
        "model": args.model,
        **provenance(),
    }
    print_last_line(report, args.json)


if __name__ == "__main__":
    main()
