"""Recompute every cell of the tables of a document from the raw figures that it names.

    python scripts/recompute_results.py [docs/results.md]

Needs the standard library alone, and nothing of ddtree: what is published is computed a second time, in another way.
A part of the document begins with `<!-- figures of FILE -->` and ends with `<!-- end of figures -->`. The exit code is
1 where a cell, a column, a table or a line above them is not what the raw figures give, and 2 where something is
missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import geometric_mean, mean, median, quantiles, stdev

PART = re.compile(r"<!-- figures of (.+?) -->(.*?)<!-- end of figures -->", re.DOTALL)
CELLS = re.compile(r"(?<!\\)\|")
PARTS = ("draft", "build", "verify", "walk", "commit")


class Runs:
    """The runs of one file at one temperature, by cell."""

    def __init__(self, header, lines, temperature):
        settings = header["settings"]
        self.baselines = settings["baselines"]
        self.cells = settings["cells"] + self.baselines
        self.lines = [line for line in lines if line["temperature"] == temperature]
        self.tasks = list(dict.fromkeys(line["task"] for line in self.lines))

    def of(self, cell, task=None):
        return [line for line in self.lines if line["cell"] == cell and task in (None, line["task"])]

    def by_prompt(self, cell, task, value):
        """The median over turns of a value of each line, for each prompt that has any."""
        prompts = {}
        for line in self.of(cell, task):
            one = value(line)
            if one is not None:
                prompts.setdefault((line["id"], line["message"]), []).append(one)
        return prompts

    def speeds(self, cell, task=None, part="decode"):
        return [
            median(turns) for turns in self.by_prompt(cell, task, lambda line: speed(line, part)).values()
        ]

    def ratios(self, cell, base, task=None, part="decode"):
        others = {(line["id"], line["message"], line["turn"]): speed(line, part) for line in self.of(base)}

        def ratio(line):
            mine, other = speed(line, part), others.get((line["id"], line["message"], line["turn"]))
            return None if mine is None or other is None else mine / other

        return [median(turns) for turns in self.by_prompt(cell, task, ratio).values()]

    def ratio(self, cell, base, task=None, part="decode"):
        found = self.ratios(cell, base, task, part)
        return median(found) if found else None

    def geometric(self, cell, base):
        found = [self.ratio(cell, base, task) for task in self.tasks]
        found = [one for one in found if one is not None]
        return geometric_mean(found) if found else None

    def tau(self, cell, task=None):
        depths = Counter()
        for line in self.of(cell, task):
            for depth, count in line["accepted_depth"].items():
                depths[int(depth) + 1] += count
        return sum(d * n for d, n in depths.items()) / sum(depths.values()) if depths else None

    def per_round(self, cell, part):
        found = [line["seconds"][part] / line["rounds"] for line in self.of(cell) if line["rounds"]]
        return median(found) * 1e3 if found else None

    def nodes(self, cell):
        rounds = sum(line["rounds"] for line in self.of(cell))
        return sum(line["nodes"] for line in self.of(cell)) / rounds if rounds else None

    def noise(self, cell):
        turns = self.by_prompt(cell, None, lambda line: speed(line, "decode")).values()
        found = [stdev(one) / mean(one) for one in turns if len(one) > 1]
        return median(found) if found else None

    def deciding(self):
        return [
            cell for cell in self.cells if way(cell) in ("auto", "tree:auto") and "+uncoupled" not in cell
        ]

    def rivals(self, cell):
        """The fixed cells that a deciding one is held against."""
        drafters = cell.partition("@")[2]
        found = []
        for name in self.cells:
            if name in self.deciding() or name in self.baselines or "+uncoupled" in name:
                continue
            same = name.partition("@")[2] == drafters
            if way(cell) == "auto":
                if not drafters or same or name == "off":
                    found.append(name)
            elif same and name.startswith("tree:"):
                found.append(name)
        return found

    def best(self, cell, task):
        found = [(name, self.ratio(name, "off", task)) for name in self.rivals(cell)]
        found = [pair for pair in found if pair[1] is not None]
        return max(found, key=lambda pair: pair[1])[0] if found else None

    def chain(self, cell):
        names = "chain" + cell[len(way(cell)) :], "chain"
        return next((name for name in names if name in self.cells and name != cell), None)


def way(cell):
    return re.match(r"[^@+]+", cell)[0]


def speed(line, part):
    tokens, seconds = line["tokens"] - (part == "decode"), line["decode_s" if part == "decode" else "total_s"]
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def num(value, places=2):
    return "-" if value is None else f"{value:.{places}f}"


def percent(value):
    return "-" if value is None else f"{value:+.1%}"


def spread(values):
    if not values:
        return "-"
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{low:.2f} to {high:.2f}"


def wins(values):
    return f"{median(values):.3f} ({sum(one >= 1 for one in values)} of {len(values)})" if values else "-"


def gain(one, other):
    return None if one is None or other is None else one / other - 1


def speedups(runs):
    cells = runs.cells[1:]
    yield ["task", *cells]
    for task in runs.tasks:
        yield [task, *(num(runs.ratio(cell, "off", task)) for cell in cells)]
    yield ["geometric mean", *(num(runs.geometric(cell, "off")) for cell in cells)]
    if "hf" in cells:
        yield ["geometric mean, over hf", *(num(runs.geometric(cell, "hf")) for cell in cells)]


def taus(runs):
    cells = [cell for cell in runs.cells[1:] if runs.tau(cell) is not None]
    yield ["task", *cells]
    for task in [*runs.tasks, None]:
        yield [task or "all", *(num(runs.tau(cell, task)) for cell in cells)]


def overall(runs):
    yield [
        "cell", "tokens/s decoding", "tokens/s in all", "speedup decoding", "quartiles", "speedup in all",
        "nodes a round", "noise", "equal", "near-tie", "different",
    ]  # fmt: skip
    for cell in runs.cells:
        kinds = Counter(line["verdict"]["kind"] for line in runs.of(cell))
        noise, ratios = runs.noise(cell), runs.ratios(cell, "off")
        middle = [runs.speeds(cell), runs.speeds(cell, part="total")]
        yield [
            cell,
            *(num(median(found) if found else None, 1) for found in middle),
            num(median(ratios) if ratios else None),
            spread(ratios),
            num(runs.ratio(cell, "off", part="total")),
            num(runs.nodes(cell), 1),
            "-" if noise is None else f"{noise:.1%}",
            *(str(kinds[kind]) for kind in ("equal", "near-tie", "different")),
        ]


def against(runs, cell):
    chain = runs.chain(cell)
    yield ["task", f"{cell} / off", f"{cell} / {chain or 'chain'}", "best fixed", f"{cell} / best fixed"]
    for task in runs.tasks:
        best = runs.best(cell, task)
        yield [
            task,
            wins(runs.ratios(cell, "off", task)),
            wins(runs.ratios(cell, chain, task)) if chain else "-",
            best or "-",
            wins(runs.ratios(cell, best, task)) if best else "-",
        ]


def rounds(runs):
    yield ["cell", *PARTS]
    for cell in runs.cells:
        if any(line["seconds"] and line["rounds"] for line in runs.of(cell)):
            yield [cell, *(num(runs.per_round(cell, part)) for part in PARTS)]


def coupling(runs):
    pairs = [(cell, f"{cell}+uncoupled") for cell in runs.cells]
    pairs = sorted((p for p in pairs if p[1] in runs.cells), key=lambda pair: runs.cells.index(pair[1]))
    yield [
        "task",
        *(name for cell, _ in pairs for name in (f"{cell} tau", "uncoupled tau", "gain", "speed gain")),
    ]
    for task in [*runs.tasks, None]:
        row = [task or "all"]
        for cell, other in pairs:
            on, off, ratio = runs.tau(cell, task), runs.tau(other, task), runs.ratio(cell, other, task)
            row += [num(on), num(off), percent(gain(on, off)), percent(gain(ratio, 1) if ratio else None)]
        yield row


def detail(runs):
    yield [
        "task, cell",
        "prompts",
        "tau",
        "tokens/s decoding",
        "tokens/s in all",
        "speedup decoding",
        "quartiles",
    ]
    for task in runs.tasks:
        for cell in runs.cells:
            decoding, total = runs.speeds(cell, task), runs.speeds(cell, task, "total")
            ratios = runs.ratios(cell, "off", task)
            yield [
                f"{task}, {cell}",
                str(len(total)),
                num(runs.tau(cell, task)) if cell != "off" else "-",
                *(num(median(found) if found else None, 1) for found in (decoding, total)),
                num(median(ratios) if ratios else None),
                spread(ratios),
            ]


def checks(header, lines):
    claims = {}
    for temperature in header["settings"]["temperatures"]:
        runs = Runs(header, lines, temperature)
        for task in runs.tasks:
            for cell in runs.cells:
                chain = runs.chain(cell)
                if chain and re.fullmatch(r"tree:\d+(@.*)?", cell) and "+uncoupled" not in cell:
                    one, other = runs.tau(cell, task), runs.tau(chain, task)
                    if one and other:
                        claims.setdefault((f"tau({cell}) >= tau({chain})", 1.0), []).append(
                            (one / other, f"{task}, T={temperature:g}")
                        )
            for cell in runs.deciding():
                chain = runs.chain(cell)
                best = runs.best(cell, task)
                for other, name in (("off", "off"), (chain, chain), (best, "the best fixed cell")):
                    ratio = runs.ratio(cell, other, task) if other else None
                    if ratio is not None:
                        claims.setdefault((f"speed({cell}) >= 0.97 of {name}", 0.97), []).append(
                            (ratio, f"{task}, T={temperature:g}")
                        )
    yield ["claim", "holds in", "least ratio", "there"]
    for (claim, bound), found in claims.items():
        held = sum(ratio >= bound for ratio, _ in found)
        yield [claim, f"{held} of {len(found)}", num(min(found)[0], 3), min(found)[1]]


TABLES = (
    (r"Speedup of decoding over off", speedups),
    (r"Tokens a round \(tau\)", taus),
    (r"Speeds, medians over all prompts", overall),
    (r"(?P<cell>\S+) against fixed choices", against),
    (r"Milliseconds of a round by part", rounds),
    (r"Drafting that looks at the noise, against drafting that does not", coupling),
    (r"Each task and cell", detail),
)


def plain(text):
    return " ".join(text.split()).replace("<!--", "&lt;!--")


def titles(header, lines):
    """Those of all tables that the raw figures give."""
    for temperature in header["settings"]["temperatures"]:
        runs, at = Runs(header, lines, temperature), f", T={temperature:g}"
        if not runs.lines:
            continue
        yield "Speedup of decoding over off" + at
        yield "Tokens a round (tau)" + at
        yield "Speeds, medians over all prompts" + at
        yield from (f"{cell} against fixed choices{at}" for cell in runs.deciding())
        yield "Milliseconds of a round by part" + at
        if temperature > 0 and any(f"{cell}+uncoupled" in runs.cells for cell in runs.cells):
            yield "Drafting that looks at the noise, against drafting that does not" + at
        yield "Each task and cell" + at
    if len(list(checks(header, lines))) > 1:
        yield "Checks"


def facts(header, lines):
    """The lines above the tables."""
    settings, machine = header["settings"], header["machine"]
    where = [machine["accelerator"]] if machine.get("accelerator") else []
    where += [
        machine["processor"],
        f"{machine['cores']} cores",
        f"{machine['threads']} threads",
        machine["system"],
    ]
    versions = [f"{name} {version}" for name, version in header["versions"].items()]
    prompts, turns = len({line["id"] for line in lines}), settings["turns"]
    how_often = "once" if turns == 1 else f"{turns} times"
    yield f"target {settings['target']}, drafter {settings['drafter']}, {settings['dtype']}; {header['date']}"
    yield f"{', '.join(where)}; {', '.join(versions)}"
    yield (
        f"{prompts} prompts of {' and '.join(settings['prompts'])}, at most {settings['max_tokens']} tokens, "
        f"measured {how_often}; command: `{header['command']}`"
    )


def expected(title, header, lines):
    if title == "Checks":
        return list(checks(header, lines))
    for pattern, table in TABLES:
        match = re.fullmatch(pattern + r", T=(?P<temperature>\S+)", title)
        if match:
            runs = Runs(header, lines, float(match["temperature"]))
            return list(table(runs, match["cell"]) if "cell" in match.groupdict() else table(runs))
    return None


def tables(text):
    """Titles, line numbers and rows of the Markdown tables of a text; the rule below the header is left out."""
    title, rows, begun = "", [], 0
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.startswith("|"):
            begun = begun or number
            rows.append([cell.strip().replace("\\|", "|") for cell in CELLS.split(line.strip())[1:-1]])
        else:
            if rows:
                yield title, begun, [row for place, row in enumerate(rows) if place != 1]
                rows, begun, title = [], 0, ""
            if line.startswith("**"):
                title = line.strip("* ")


def compare(title, line, shown, wanted):
    """The faults of a table, and how many cells were compared."""
    if wanted is None:
        return [f"line {line}: no raw figures are known to give a table {title!r}"], 0
    if len(shown) != len(wanted):
        return [f"line {line}, {title}: {len(shown) - 1} rows, and the raw figures give {len(wanted) - 1}"], 0
    faults, count = [], 0
    for offset, (row, right) in enumerate(zip(shown, wanted, strict=True)):
        at = line + offset + (offset > 0)
        if len(row) != len(right):
            faults.append(f"line {at}, {title}: {len(row)} columns, and the raw figures give {len(right)}")
            continue
        for name, cell, value in zip(wanted[0], row, right, strict=True):
            count += 1
            if cell != plain(value):
                faults.append(
                    f"line {at}, {title}, {row[0]}, {name}: {cell}, and the raw figures give {value}"
                )
    return faults, count


def check_part(folder, source, text, first):
    path = folder / source
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    header, lines = records[0], [record for record in records if record["kind"] == "run"]
    faults, cells, found_titles = [], 0, Counter()
    for fact in facts(header, lines):
        if f"- {plain(fact)}" not in text.split("\n"):
            faults.append(
                f"line {first}: the raw figures give the line '- {plain(fact)}', which is not there"
            )
    for title, line, shown in tables(text):
        found, compared = compare(title, first + line - 1, shown, expected(title, header, lines))
        faults += found
        cells += compared
        found_titles[title] += 1
    for title in titles(header, lines):
        if found_titles[title] != 1:
            faults.append(
                f"line {first}: {found_titles[title]} tables {title!r}, and the raw figures give one"
            )
    print(f"{source}: {found_titles.total()} tables, {cells} cells, {len(faults)} faults")
    return faults


def main(arguments):
    document = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "docs" / "results.md"
    try:
        text = document.read_text(encoding="utf-8")
        parts = list(PART.finditer(text))
        if not parts:
            print(f"{document} has no part that begins with <!-- figures of FILE -->", file=sys.stderr)
            return 2
        faults = []
        for part in parts:
            first = text.count("\n", 0, part.start(2)) + 1
            faults += check_part(document.parent, part[1], part[2], first)
    except (OSError, ValueError, LookupError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    rest = PART.sub("", text)
    outside = sum(1 for _ in tables(rest))
    if outside:
        print(f"{outside} tables outside of these parts were not checked")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
