"""Wrong use and wrong input: exit code 2 and one line that names the cure, for every command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastactrec import cli
from fastactrec.cli import COMMANDS
from fastactrec.config import TrainConfig, parse_size, parse_weights
from fastactrec.config_file import from_table, load_toml, to_table
from fastactrec.errors import InputError


def refused(capsys, command, *argv) -> str:
    assert cli.run(command, [str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith(f"fastactrec {command}: ")
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_exits_0(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.run(command, ["--help"])
    assert stop.value.code in (0, None)
    text = capsys.readouterr().out
    for name, field in COMMANDS[command].__dataclass_fields__.items():
        shown = "PATH" if "Positional" in field.type else f"--{name.replace('_', '-')}"
        assert shown in text, name


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--period", "0"], "--period 0: must be at least 1"),
        (["--period", "x"], "--period"),
        (["--no-such-flag", "1"], "--no-such-flag"),
        (["--streams", "rgb,sound"], "'sound' is not one of rgb, flow"),
        (["--streams", "rgb,rgb"], "named twice"),
        (["--data", "/no/such/pack"], "/no/such/pack: no such pack; make one with 'prepare'"),
        (["--lr", "-1"], "--lr -1.0: must be above 0"),
        (["--scales", "1,2"], "--scales 1,2: numbers in (0, 1]"),
        (["--fusion-weights", "rgb=much"], "write STREAM=NUMBER"),
        (["--config", "/no/such.toml"], "/no/such.toml: No such file"),
        (["--init-rgb", "/no/such.safetensors"], "--init-rgb /no/such.safetensors: no such file"),
    ],
)
def test_train_refuses(capsys, argv, words):
    assert words in refused(capsys, "train", *argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/no/such/folder", "--out", "pack"], "/no/such/folder: no such file or folder"),
        (["."], "--out"),
        ([".", "--out", "pack", "--size", "12"], "--size 12: give short:N"),
        ([".", "--out", "pack", "--size", "8x8"], "sides are 16 to 8192"),
        (
            [".", "--out", "pack", "--test-fraction", "0.6", "--val-fraction", "0.5"],
            "leave nothing to train on",
        ),
        ([".", "--out", "pack", "--bound-px", "0"], "--bound-px 0.0"),
        ([".", "--out", "pack", "--quality", "101"], "--quality 101"),
    ],
)
def test_prepare_refuses(capsys, argv, words):
    assert words in refused(capsys, "prepare", *argv)


def test_commands_on_a_folder_that_is_no_run(capsys, tmp_path):
    assert "no run here" in refused(capsys, "evaluate", "--run", tmp_path)
    assert "no run here" in refused(capsys, "predict", "--run", tmp_path, tmp_path / "clip.mp4")
    assert str(tmp_path) in refused(capsys, "report", tmp_path)
    assert "no such run folder" in refused(capsys, "evaluate", "--run", tmp_path / "nothing")


def test_config_files_are_checked_key_by_key(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    for text, words in {
        "epoch = 3": "unknown option 'epoch'",
        "epochs = 'three'": "epochs must be int",
        "flip = 1": "flip must be bool",
        "arch = 'vgg'": "is not one of resnet18",
        "epochs = ": "not valid TOML",
    }.items():
        path.write_text(text)
        assert words in refused(capsys, "train", "--config", path)


def test_flags_override_the_config_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 7\nlr = 1\nflip = false\n")
    config = cli.parse("train", ["--config", str(path), "--epochs", "3"])
    assert (config.epochs, config.lr, config.flip) == (3, 1.0, False)


def test_without_data_the_synthetic_recipe_applies():
    assert cli.parse("train", []).crop == 56
    assert cli.parse("train", ["--config", "synthetic", "--crop", "48"]).crop == 48


def test_config_round_trips_through_toml(tmp_path):
    import tomli_w

    config = TrainConfig(epochs=2, init_rgb=tmp_path, fusion_weights="flow=2")
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(to_table(config)))
    assert from_table(TrainConfig, load_toml(path), str(path)) == config


def test_sizes_and_weights():
    assert parse_size("short:256") == (256, None)
    assert parse_size("340x256") == (340, 256)
    assert parse_weights("flow=1.5", ("rgb", "flow")) == {"rgb": 1.0, "flow": 1.5}
    assert parse_weights("rgb=1,flow=1.5", ("flow",)) == {"flow": 1.5}
    with pytest.raises(InputError, match="all weights are zero"):
        parse_weights("rgb=0", ("rgb",))


def test_console_script_lists_commands_and_refuses_others():
    script = [sys.executable, "-c", "import sys; from fastactrec.cli import main; sys.exit(main())"]
    listed = subprocess.run([*script, "--help"], capture_output=True, text=True, check=True)
    assert all(name in listed.stdout for name in COMMANDS)
    wrong = subprocess.run([*script, "fly"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "'fly' is not one of" in wrong.stderr
    assert len(wrong.stderr.strip().splitlines()) == 1
    version = subprocess.run([*script, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("fastactrec 0.")
