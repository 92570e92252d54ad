"""Table and figure of links.py, from its JSON: ``python profiling/links_report.py links.json`` makes them anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from links_arms import WINDOW, arms, baseline

HEADER_BYTES = 14 + 20 + 32  # Ethernet, IPv4 and TCP with time stamps, of every packet


def summary(turns: list[dict], period: int) -> dict:
    """Figures of one arm, per WINDOW steps: means over its turns, which are whole cycles.

    Exposed communication: seconds in which a rank's host waits, of the rank that waits longest. Wire: of each step the
    rank that waits least, since the others wait for that one.
    """
    steps = sum(len(turn["step_s"][0]) for turn in turns)
    windows = steps / WINDOW
    ranks = len(turns[0]["step_s"])
    blocked = [[s for turn in turns for s in turn["blocked_s"][rank]] for rank in range(ranks)]
    averaging = [k for k in range(steps) if (k + 1) % period == 0]
    tx = [sum(turn["tx_bytes"][rank] for turn in turns) for rank in range(ranks)]
    headers = [HEADER_BYTES * sum(turn["tx_packets"][rank] for turn in turns) for rank in range(ranks)]
    formula = sum(turn["formula_bytes"] for turn in turns)
    counted = [sum(turn["sent_bytes"][rank] for turn in turns) for rank in range(ranks)]
    payload = sum(tx) / ranks - sum(headers) / ranks
    return {
        "steps": steps,
        "seconds": sum(max(turn["seconds"]) for turn in turns) / windows,
        "step_ms": 1e3 * median(max(s) for turn in turns for s in zip(*turn["step_s"], strict=True)),
        "exposed_s": max(map(sum, blocked)) / windows,
        "wire_s": sum(map(min, zip(*blocked, strict=True))) / windows,
        "averaging_s": median(max(rank[k] for rank in blocked) for k in averaging),
        "interface_mb": sum(tx) / ranks / windows / 1e6,
        "payload_mb": payload / windows / 1e6,
        "formula_mb": formula / windows / 1e6,
        "interface_over_formula": sum(tx) / ranks / formula if formula else None,
        "payload_over_formula": payload / formula if formula else None,
        "averager_over_formula": sum(counted) / ranks / formula if formula and any(counted) else None,
    }


def compare(document: dict) -> list[dict]:
    """One row for each arm, rate and network, of the last session that has it, beside that session's ddp."""
    rows = {}
    for session in document["sessions"]:
        settings = session["settings"]
        known = arms(settings["delay"])
        for rate, measured in session["rates"].items():
            figures = {name: summary(result["turns"], known[name].period) for name, result in measured["arms"].items()}
            for name, row in figures.items():
                row |= {"arch": settings["arch"], "ranks": settings["ranks"], "rate": rate, "arm": name}
                if (ddp := figures.get("ddp")) and known[name].kind != "alone":
                    row["times_less_exposed"] = ddp["exposed_s"] / row["exposed_s"]
                    row["times_less_wire"] = ddp["wire_s"] / row["wire_s"]
                    row["times_faster"] = ddp["seconds"] / row["seconds"]
                if alone := figures.get(baseline(known[name])):
                    row["over_alone_s"] = row["seconds"] - alone["seconds"]
                if every := measured["arms"][name]["average_all"]:
                    row["average_all_s"] = max(every)
                rows[settings["arch"], settings["ranks"], rate, name] = row
    order = list(arms(8))
    return sorted(rows.values(), key=lambda r: (r["arch"], r["ranks"], r["rate"], order.index(r["arm"])))


COLUMNS = {
    "arm": ("arm", "{}"),
    "seconds": ("s", "{:.2f}"),
    "times_faster": ("times faster", "{:.1f}"),
    "exposed_s": ("exposed s", "{:.2f}"),
    "times_less_exposed": ("times less", "{:.1f}"),
    "wire_s": ("wire s", "{:.2f}"),
    "times_less_wire": ("times less", "{:.1f}"),
    "over_alone_s": ("s over alone", "{:.2f}"),
    "averaging_s": ("s per averaging", "{:.2f}"),
    "average_all_s": ("s at epoch end", "{:.2f}"),
    "formula_mb": ("MB by formula", "{:.1f}"),
    "payload_over_formula": ("payload / formula", "{:.3f}"),
    "interface_over_formula": ("interface / formula", "{:.3f}"),
}


def table(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(head for head, _ in COLUMNS.values()) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in rows:
        cells = ["" if row.get(key) is None else text.format(row[key]) for key, (_, text) in COLUMNS.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


NOTES = f"""\
All figures are for {WINDOW} steps, each measured over at least {WINDOW} (desloc: a whole cycle of 6 rounds, its mean);
nothing is extrapolated. The turns of the arms of a run alternate.

- **exposed**: host time blocked in communication, of the rank that was blocked longest: in DDP from the last gradient
  bucket to the end of backward (the trainer's own measure), else the time inside `ParameterAverager.step()`, waiting
  for slower ranks, scaling and quantising included. **wire**: the same, but in each step of the rank that was blocked
  shortest; the rest is waiting for the slowest rank, which no faster network shortens. **times less** / **faster**: DDP
  of the same run over this arm.
- **s over alone**: the time less that of the same steps without communication, measured beside it.
- **s per averaging**: median over averagings (DDP: steps), largest of the ranks. **s at epoch end**: `average_all()`,
  which also averages both moments; it comes once per epoch and is not in the other columns.
- **MB by formula**: sent per rank, 2 (n - 1) / n of each array averaged (gloo's ring). **interface**: bytes that left
  the rank's interface, acknowledgements and retransmissions included; **payload**: less {HEADER_BYTES} bytes for each
  packet (Ethernet, IPv4, TCP with time stamps). At 100 Mb/s tc cuts into frames of 1514 bytes (4.6 % of headers, and
  acknowledgements); at 1 Gb/s it lets packets of up to 64 KB pass, as a network card would take them, and few headers
  are counted. The limit of the link counts them all either way.
"""


def markdown(document: dict, rows: list[dict]) -> str:
    parts = ["# Training over slow links"]
    last = document["sessions"][-1]
    about, settings = last["environment"], last["settings"]
    parts.append(
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']} (gloo), "
        f"{about['date']}. One process and one thread per rank; frames of {settings['size']} px, {settings['batch']} "
        f"per rank and step; delayed arms take {settings['delay']} local steps while the mean is on its way."
    )
    for arch, ranks, rate in dict.fromkeys((row["arch"], row["ranks"], row["rate"]) for row in rows):
        chosen = [row for row in rows if (row["arch"], row["ranks"], row["rate"]) == (arch, ranks, rate)]
        sessions = [s for s in document["sessions"] if (s["settings"]["arch"], s["settings"]["ranks"]) == (arch, ranks)]
        tcp = [min(s["rates"][rate]["tcp_bits_per_s"]) / 1e6 for s in sessions if rate in s["rates"]]
        parts.append(f"## {arch}, {ranks} ranks, links of {rate}")
        parts.append(f"Plain TCP, all ranks sending round the ring: {min(tcp):.0f} Mb/s of payload, the slowest link.")
        parts.append(table(chosen))
    parts.append(NOTES.rstrip())
    return "\n\n".join(parts) + "\n"


def figure(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys((row["arch"], row["ranks"], row["rate"]) for row in rows))
    drawn, axes = plt.subplots(len(cases), 2, figsize=(12, 0.6 + 3.6 * len(cases)), squeeze=False, sharex="col")
    for (arch, ranks, rate), (left, right) in zip(cases, axes, strict=True):
        chosen = [row for row in rows if (row["arch"], row["ranks"], row["rate"]) == (arch, ranks, rate)]
        chosen = [row for row in chosen if not row["arm"].startswith("alone")][::-1]
        places = range(len(chosen))
        names = [row["arm"] for row in chosen]
        left.barh([y + 0.2 for y in places], [r["exposed_s"] for r in chosen], 0.38, color="#2f6690", label="exposed")
        left.barh([y - 0.2 for y in places], [r["wire_s"] for r in chosen], 0.38, color="#9cc5e0", label="wire")
        for y, row in zip(places, chosen, strict=True):
            if "times_less_exposed" in row and row["arm"] != "ddp":
                left.text(
                    row["exposed_s"] * 1.08, y + 0.2, f"{row['times_less_exposed']:.1f}x less", va="center", size=8
                )
        left.set_xscale("log")
        left.set_title(f"{arch}, {ranks} ranks, {rate}: seconds of communication per {WINDOW} steps", size=10)
        right.barh(list(places), [r["payload_mb"] for r in chosen], 0.6, color="#c9d6c3", label="on the interface")
        right.plot([r["formula_mb"] for r in chosen], list(places), "k|", markersize=14, label="by formula")
        right.set_xscale("log")
        right.set_title(f"megabytes of payload per rank and {WINDOW} steps", size=10)
        for ax in (left, right):
            ax.set_yticks(list(places), names, size=9)
            ax.grid(axis="x", alpha=0.3)
            ax.set_axisbelow(True)
            ax.legend(loc="lower right", fontsize=8)
    for ax in axes[:, 0]:
        low, high = ax.get_xlim()
        ax.set_xlim(low, high * 2)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def write(document: dict, out: Path) -> str:
    """NAME.md and NAME.png beside NAME.json; returns the Markdown."""
    rows = compare(document)
    text = markdown(document, rows)
    out.with_suffix(".md").write_text(text)
    figure(rows, out.with_suffix(".png"))
    return text


if __name__ == "__main__":
    print(write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1])))
