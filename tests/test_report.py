"""The report: what it reads, what it says, that nothing in it is unescaped, and how a browser renders it."""

import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folder import class_names, write_run

from fastactrec.config import ReportConfig
from fastactrec.errors import InputError
from fastactrec.report import run_command, write_report
from fastactrec.reporting.run_files import read_run
from fastactrec.reporting.run_page import step_axis

HOSTILE = ["<script>alert(1)</script>", 'a & b "q"', "</style><b>", "$x^2$ ünïcode", "'; drop", "x" * 80]


class Page(HTMLParser):
    """The text, tags and attributes of a page; unknown to the writer's own helper."""

    def __init__(self, text: str):
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(*folders, out=None) -> tuple[str, Page]:
    path = write_report(ReportConfig(tuple(folders), out))
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.mark.parametrize("classes", [3, 51])
def test_page_of_one_run(tmp_path, capsys, classes):
    folder = write_run(tmp_path / "exp", classes=class_names(classes), clips=2 * classes)
    assert run_command("report", [str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    text, page = page_of(folder)
    assert page.open == []  # every element is closed
    summary = json.loads((folder / "summary.json").read_text())
    for row in [*summary["streams"].values(), summary["fused"]]:
        assert f"{100 * row['top1']:.1f} %" in page.text
    assert f"{2 * classes} clips, 3 segments × 1 crop, test part of split “default”" in page.text
    assert "rgb 1 : flow 1.5" in page.text
    for name in class_names(classes):
        assert name in page.text
    for words in ("AMD EPYC 9B45", "extension.isa", "exposed communication", "decoupled"):
        assert words in page.text
    assert ("top-5" in page.text) == (classes > 5)
    assert len(text) < 250_000


def test_page_needs_nothing_from_outside(tmp_path):
    text, page = page_of(write_run(tmp_path / "exp", classes=class_names(3)))
    assert "script" not in page.tags
    assert not re.search(r"https?:|url\(|@import", text)
    links = [value for name, value in page.attributes if name in ("src", "href", "data", "action", "srcset")]
    assert links == ["data:,"]
    assert "prefers-color-scheme: dark" in text


def test_pictures_have_text_alternatives_and_boxes_take_the_keyboard(tmp_path):
    text, page = page_of(write_run(tmp_path / "exp", classes=class_names(3)))
    drawings = re.findall(r"<svg[^>]*>", text)
    assert drawings
    assert all('role="img" aria-label="' in tag or 'aria-hidden="true"' in tag for tag in drawings)
    boxes = re.findall(r'<div class="scroll[^>]*>', text)
    assert len(boxes) == page.tags.count("table") + 1  # and the confusion matrix
    assert all("tabindex" in tag and "aria-label" in tag for tag in boxes)


def test_names_are_escaped_everywhere(tmp_path):
    folder = write_run(tmp_path / "<img src=x onerror=alert(2)>", classes=HOSTILE, config={"name": "<i>&"})
    other = write_run(tmp_path / 'b"><script>', classes=HOSTILE, seed=1)
    for page in (page_of(folder)[1], page_of(folder, other, out=tmp_path / "c.html")[1]):
        assert not {"script", "img", "b"} & set(page.tags)
        assert not [name for name, _ in page.attributes if name.startswith("on")]
    page = page_of(folder)[1]
    for name in HOSTILE:
        assert " ".join(name.split()) in page.text


def test_per_class_numbers_against_a_plain_count(tmp_path):
    folder = write_run(tmp_path / "exp", classes=class_names(5), clips=63, seed=4)
    with open(folder / "scores.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["stream"] == "fused"]
    result = read_run(folder).scores["fused"]
    for t, true in enumerate(class_names(5)):
        for p, predicted in enumerate(class_names(5)):
            clips = sum(row["label"] == true and row["predicted"] == predicted for row in rows)
            assert result.confusion[t, p] == clips
    assert result.top1 == sum(row["label"] == row["predicted"] for row in rows) / len(rows)


def test_a_run_that_was_not_evaluated_yet(tmp_path):
    page = page_of(write_run(tmp_path / "exp", classes=class_names(3), evaluated=False, val=False))[1]
    assert "Not evaluated yet: run 'fastactrec evaluate'" in page.text
    assert "rgb training" in page.text
    assert "rgb validation" not in page.text


def test_one_stream_without_fusion(tmp_path):
    folder = write_run(tmp_path / "exp", classes=class_names(3))
    summary = json.loads((folder / "summary.json").read_text())
    del summary["fused"], summary["streams"]["rgb"], summary["protocol"]["weights"]["rgb"]
    (folder / "summary.json").write_text(json.dumps(summary))
    page = page_of(folder)[1]
    assert "flow top-1" in page.text
    assert "Fused by" not in page.text


def test_a_summary_of_another_evaluation_is_told(tmp_path):
    folder = write_run(tmp_path / "exp", classes=class_names(3))
    summary = json.loads((folder / "summary.json").read_text())
    summary["fused"]["top1"] = 0.123
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "they come from different evaluations" in page_of(folder)[1].text


def test_torn_lines_and_repeats_after_a_resume(tmp_path):
    folder = write_run(tmp_path / "exp", classes=class_names(3), epochs=3, steps=2)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    again = json.loads(lines[0]) | {"loss": 99.0}
    path.write_text("\n".join([*lines, '{"kind":"st', json.dumps(again), '{"kind": "epoch", "str']))
    files = read_run(folder)
    assert [step["loss"] for step in files.logs["rgb"].steps if step["loss"] == 99.0] == [99.0]
    assert len(files.logs["rgb"].steps) == 6
    assert files.notes == ["1 broken line(s) of metrics.jsonl left out (the run was killed while writing)"]
    assert step_axis(files.logs["rgb"]) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


def test_a_loss_that_is_not_finite_is_left_out_of_the_line(tmp_path):
    folder = write_run(tmp_path / "exp", classes=class_names(3), epochs=3)
    path = folder / "metrics.jsonl"
    path.write_text(re.sub(r'("epoch": 1, "loss": )[0-9.]+', r"\1NaN", path.read_text()))
    assert "nan" not in page_of(folder)[0].lower().replace("nance", "")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", None, "metrics.jsonl: missing; .* is not a run folder"),
        ("config.toml", None, "config.toml: missing"),
        ("config.toml", "a = [", "config.toml: not valid TOML"),
        ("metrics.jsonl", "x\ny\n", "metrics.jsonl: no line is JSON"),
        ("metrics.jsonl", "[1]\n", "line 1 is not an object"),
        ("metrics.jsonl", '{"kind": "epoch", "stream": "rgb", "epoch": 0}\n', "line 1: 'loss' is missing"),
        ("summary.json", "{", "summary.json: cannot be read .*; run 'fastactrec evaluate' again"),
        ("summary.json", "{}", "summary.json: lacks a field"),
        ("summary.json", "[]", "summary.json: lacks a field"),
        ("summary.json", '{"streams": {"rgb": {"top1": 71, "mean_class": 1}}, "clips": 3}', "71 is no"),
        ("summary.json", '{"streams": {}, "clips": 3, "seconds": {"total": "9"}}', "seconds are no numbers"),
        ("scores.csv", "clip,label\n1,2\n", "scores.csv: no column or class"),
        ("confusion.csv", "a,b\nb,x\n", "confusion.csv: not a confusion matrix"),
        ("confusion.csv", "", "confusion.csv: not a confusion matrix"),
    ],
)  # fmt: skip
def test_broken_files_are_named_with_a_cure(tmp_path, name, text, message):
    folder = write_run(tmp_path / "exp", classes=class_names(3))
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        write_report(ReportConfig((folder,)))
    assert str(folder / name) in str(caught.value)
    assert not (folder / "report.html").exists()


def test_command_line(tmp_path, capsys):
    folder = write_run(tmp_path / "exp", classes=class_names(3))
    assert run_command("report", [str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert run_command("report", [str(tmp_path / "nothing")]) == 2
    assert run_command("report", [str(folder), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "choose a file in an existing folder with --out" in capsys.readouterr().err


def test_comparison(tmp_path):
    three = class_names(3)
    arms = [
        write_run(tmp_path / "ddp", classes=three, config={"sync": "ddp"}),
        write_run(tmp_path / "kavg", classes=three, seed=1),
        write_run(tmp_path / "kavg2", classes=three, seed=2),
    ]
    page = page_of(*arms, out=tmp_path / "c.html")[1]
    results = [json.loads((arm / "summary.json").read_text())["fused"]["top1"] for arm in arms]
    difference = 100 * (results[1] - results[0])
    assert f"{difference:+.1f} points".replace("-", "−") in page.text
    mean, spread = 100 * np.mean(results[1:]), 100 * np.std(results[1:], ddof=1)
    assert "sync kavg 2 " in page.text  # two seeds of one set of options
    assert f"{mean:.1f} ± {spread:.1f} %" in page.text
    assert "Options that differ option ddp kavg kavg2 seed 0 1 2 sync ddp kavg kavg" in page.text
    assert "not measured on the same thing" not in page.text


def test_comparison_pairs_the_same_clips(tmp_path):
    one = write_run(tmp_path / "one", classes=class_names(3), clips=60, skill=(1, 1, 1))
    two = write_run(tmp_path / "two", classes=class_names(3), clips=60, skill=(1, 1, 0))
    page = page_of(one, two, out=tmp_path / "c.html")[1]
    wrong = sum(not hit for hit in read_run(two).scores["fused"].hits)
    assert f"two 60 0 {wrong} 0.000" in page.text


def test_comparison_says_what_cannot_be_compared(tmp_path):
    one = write_run(tmp_path / "a" / "run", classes=class_names(3), clips=60)
    two = write_run(tmp_path / "b" / "run", classes=class_names(3), clips=30)
    three = write_run(tmp_path / "c" / "run", classes=class_names(3), evaluated=False)
    page = page_of(one, two, three, out=tmp_path / "c.html")[1]
    assert "not measured on the same thing. a/run: 60 clips" in page.text
    assert "Not evaluated yet: c/run." in page.text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files"),
    *("--enable-logging=stderr", "--log-level=0", "--dump-dom"),
]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")
@pytest.mark.parametrize("width", [360, 1440])
def test_browser_renders_without_complaint_and_without_sideways_scrolling(tmp_path, width):
    folder = write_run(tmp_path / "exp", classes=HOSTILE, seed=2)
    arms = [write_run(tmp_path / f"arm {i} with a long name", classes=class_names(51), seed=i) for i in range(2)]
    for path in (write_report(ReportConfig((folder,))), write_report(ReportConfig(tuple(arms), tmp_path / "c.html"))):
        # a frame, since a headless window can be no narrower than 500 px; the script is the test's
        outer = tmp_path / "outer.html"
        outer.write_text(
            f'<iframe src="{path.as_uri()}" style="width:{width}px;height:9000px;border:0"></iframe><script>'
            'onload = () => { const d = document.querySelector("iframe").contentDocument.documentElement;'
            "document.title = `${d.clientWidth} ${d.scrollWidth} ${d.scrollHeight}`; }</script>"
        )
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", outer.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr
        client, scrolled, height = map(int, re.search(r"<title>(\d+) (\d+) (\d+)", done.stdout).groups())
        assert client == width
        assert scrolled == width  # wide tables scroll inside themselves
        assert height > 1000
