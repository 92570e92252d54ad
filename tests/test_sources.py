"""What SRC holds: every layout, official lists with their counts, splits that keep groups together."""

import csv
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastactrec.data.frames import read_frame_folder
from fastactrec.data.sources import find_source, scan
from fastactrec.data.splits import group_split, read_lists
from fastactrec.errors import DecodeError, InputError


def make(root: Path, *names: str) -> Path:
    """Empty files: sources are told by names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def table(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


# CSV


def test_surveillance_fight(shared_data):
    source = find_source(shared_data / "surveillance-fight")
    assert (source.layout, source.classes, source.splits) == ("csv", ["fight", "noFight"], {})
    assert Counter(clip.label for clip in source.clips) == {"fight": 93, "noFight": 70}
    assert source.clips[0].id == "fight/fi001.mp4"
    assert source.clips[0].group == "7q6KJoSgxmY"
    assert all(clip.path.is_file() for clip in source.clips)


def test_ceiling_segments_and_classes_filter(shared_data):
    path = shared_data / "ceiling-actions" / "segments.csv"
    source = find_source(path, classes="walk,sitdown, standup,falling,sit")
    assert Counter(clip.label for clip in source.clips) == {
        "walk": 52, "standup": 47, "sitdown": 20, "falling": 20, "sit": 20,
    }  # fmt: skip
    first = source.clips[0]
    assert first.id == "20200626_154313_mlx90640_01_light_none.mp4:88-166"
    assert (first.start, first.end, first.group) == (88, 166, "20200626_154313_mlx90640_01_light_none.mp4")
    assert first.path.parent.name == "video"
    assert first.path.is_file()
    # labels.csv beside it is not a table of clips, so the folder means segments.csv
    assert len(find_source(path.parent).clips) == 191
    with pytest.raises(InputError, match=r"--classes walk,fly: 'fly' is not a class .*classes: active, falled"):
        find_source(path, classes="walk,fly")


def test_csv_problems_become_rejections(shared_data, tmp_path):
    source = find_source(shared_data / "dataset-samples")
    assert Counter(clip.problem for clip in source.clips) == {"": 7, "no label": 3}
    make(tmp_path, "a.mp4", "b.mp4")
    rows = ("path,label", "a.mp4,x", "gone.mp4,x", "b.mp4,y", "a.mp4,x")
    problems = [clip.problem for clip in find_source(table(tmp_path / "clips.csv", *rows)).clips]
    assert problems == ["", "no such file", "", "listed twice"]


def test_csv_with_byte_order_mark_blanks_and_split(tmp_path):
    make(tmp_path, "a.mp4", "b, c.mp4", "d.mp4")
    rows = ("path, label ,split", "a.mp4, x ,Training", '"b, c.mp4",x,validate', "d.mp4,y,test")
    table(tmp_path / "clips.csv", *rows)
    (tmp_path / "clips.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "clips.csv").read_bytes())
    source = find_source(tmp_path)
    assert source.classes == ["x", "y"]
    assert source.splits == {"default": {"a.mp4": "train", "b, c.mp4": "val", "d.mp4": "test"}}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("path,lable", "a.mp4,x"), r"clips.csv: no column label \(columns: path, lable\)"),
        (("file,label", "a.mp4,x"), r"no column path \(or video\)"),
        (("a,b", "1,2"), r"no column path \(or video\) and no column label"),
        (("path,label,start_frame", "a.mp4,x,-3"), r"clips.csv:2: start_frame '-3' is not a whole number"),
        (("path,label,start_frame,end_frame", "a.mp4,x,5,5"), "clips.csv:2: end_frame 5 is not above"),
        (("path,label,split", "a.mp4,x,tset"), "clips.csv:2: split 'tset' is not train, val or test"),
        (("path,label", ",x"), "clips.csv:2: the column path is empty"),
        (("path,label", "gone.mp4,x"), r"no clip can be used \(1 listed; the first: gone.mp4: no such file"),
        (("path,label",), r"no clip can be used \(0 listed"),
    ],
)
def test_bad_csv_is_refused_by_line(tmp_path, rows, message):
    make(tmp_path, "a.mp4")
    with pytest.raises(InputError, match=message):
        find_source(table(tmp_path / "clips.csv", *rows))


def test_two_tables_in_a_folder_are_ambiguous(tmp_path):
    for name in ("one.csv", "two.csv"):
        table(make(tmp_path, "a.mp4") / name, "path,label", "a.mp4,x")
    with pytest.raises(InputError, match=r"has one.csv, two.csv; name the file"):
        find_source(tmp_path)


# Class folders


def test_class_folders(tmp_path):
    make(
        tmp_path,
        "run/b.mp4",
        "run/deep/a.AVI",
        "walk # [1]/v_walk_g02_c01.avi",
        "stray.mp4",
        "run/notes.txt",
        ".x/a.mp4",
    )
    source = find_source(tmp_path)
    assert (source.layout, source.classes) == ("classes", ["run", "walk # [1]"])
    assert [(c.id, c.label, c.group, c.problem) for c in source.clips] == [
        ("run/b.mp4", "run", "run/b.mp4", ""),
        ("run/deep/a.AVI", "run", "run/deep/a.AVI", ""),
        ("stray.mp4", "", "stray.mp4", "not in a class folder"),
        ("walk # [1]/v_walk_g02_c01.avi", "walk # [1]", "v_walk_g02", ""),
    ]


def test_train_and_test_folders_are_a_split_not_classes(tmp_path):
    source = find_source(make(tmp_path, "train/run/a.mp4", "validation/run/b.mp4", "test/sit/c.mp4"))
    assert source.classes == ["run", "sit"]
    assert source.splits["default"] == {
        "train/run/a.mp4": "train",
        "validation/run/b.mp4": "val",
        "test/sit/c.mp4": "test",
    }


def test_a_video_is_not_a_source_and_lists_need_their_layout(tmp_path):
    make(tmp_path, "run/a.mp4")
    with pytest.raises(InputError, match=r"a.mp4: neither a folder nor a .csv file"):
        find_source(tmp_path / "run" / "a.mp4")
    with pytest.raises(InputError, match="not used by --layout classes"):
        find_source(tmp_path, "classes", tmp_path)
    with pytest.raises(InputError, match="not a folder, which --layout classes needs"):
        find_source(tmp_path / "run" / "a.mp4", "classes")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no videos, no frame folders .* and no CSV"):
        find_source(tmp_path)


# Official lists


def test_ucf101_lists(shared_data):
    lists = read_lists(shared_data / "splits" / "ucf101")
    assert (len(lists.classes), lists.classes[0], lists.classes[-1]) == (101, "ApplyEyeMakeup", "YoYo")
    counts = {name: Counter(parts.values()) for name, parts in lists.splits.items()}
    assert counts == {
        "official1": {"train": 9537, "test": 3783},
        "official2": {"train": 9586, "test": 3734},
    }
    assert len(lists.labels) == 13320
    assert lists.labels["HandstandPushups/v_HandStandPushups_g01_c01.avi"] == "HandstandPushups"
    for parts in lists.splits.values():
        groups = {part: {key[:-8] for key in parts if parts[key] == part} for part in ("train", "test")}
        assert not groups["train"] & groups["test"]


def test_hmdb51_lists(shared_data):
    lists = read_lists(shared_data / "splits" / "hmdb51")
    names = (shared_data / "splits" / "hmdb51" / "class_list.txt").read_text().split()
    assert lists.classes == sorted(names)
    assert len(lists.labels) == 6766
    for parts in lists.splits.values():
        per_class = Counter((lists.labels[clip], part) for clip, part in parts.items())
        assert set(per_class.values()) == {70, 30}
        assert len(per_class) == 2 * 51


def test_ucf101_tree_is_matched_without_regard_to_case(shared_data, tmp_path):
    lists = shared_data / "splits" / "ucf101"
    make(
        tmp_path,
        "HandstandPushups/v_HandstandPushups_g01_c01.avi",  # as some archives spell it; the lists: HandStand
        "YoYo/v_YoYo_g25_c05.avi",
        "YoYo/v_YoYo_g99_c01.avi",  # in no list
    )
    source = find_source(tmp_path, lists=lists)
    assert source.layout == "ucf101"
    usable = [clip for clip in source.clips if not clip.problem]
    assert [(clip.label, clip.group) for clip in usable] == [
        ("HandstandPushups", "v_HandStandPushups_g01"),
        ("YoYo", "v_YoYo_g25"),
    ]
    assert Counter(clip.problem for clip in source.clips)["no such file"] == 13318
    assert source.splits["official1"][usable[0].id] == "test"
    assert find_source(tmp_path, lists=lists, classes="YoYo").classes == ["YoYo"]
    # the lists beside the videos are found by themselves
    shutil.copytree(lists, tmp_path / "ucfTrainTestlist")
    assert find_source(tmp_path).layout == "ucf101"


def test_hmdb51_tree(shared_data, tmp_path):
    lists = shared_data / "splits" / "hmdb51"
    names = [*sorted(read_lists(lists).labels)[::700], "brush_hair/April_09_brush_hair_u_nm_np1_ba_goo_1.avi"]
    source = find_source(make(tmp_path, *names), "hmdb51", lists)
    assert sorted(clip.id for clip in source.clips if not clip.problem) == sorted(set(names))
    assert source.splits["official1"]["brush_hair/April_09_brush_hair_u_nm_np1_ba_goo_1.avi"] == "train"


def test_contradicting_or_missing_lists(shared_data, tmp_path):
    make(tmp_path / "videos", "A/v_A_g01_c01.avi")
    lists = tmp_path / "lists"
    table(lists / "classInd.txt", "1 A", "2 B")
    with pytest.raises(InputError, match=r"no trainlist01.txt"):
        find_source(tmp_path / "videos", lists=lists)
    table(lists / "trainlist01.txt", "A/v_A_g01_c01.avi 2")
    with pytest.raises(InputError, match=r"trainlist01.txt:1: .* has number 2, which is not its class"):
        find_source(tmp_path / "videos", lists=lists)
    table(lists / "trainlist01.txt", "A/v_A_g01_c01.avi 1")
    with pytest.raises(InputError, match=r"testlist01.txt: this list is missing"):
        find_source(tmp_path / "videos", lists=lists)
    table(lists / "testlist01.txt", "A/v_A_g01_c01.avi")
    with pytest.raises(InputError, match=r"testlist01.txt:1: .* is in the train list too"):
        find_source(tmp_path / "videos", lists=lists)
    with pytest.raises(InputError, match="no ucf101 lists there; name their folder with --lists"):
        find_source(tmp_path / "videos", "ucf101")


# Kinetics


def test_kinetics(tmp_path):
    make(tmp_path / "videos", "arm wrestling/aBc-_1_000003_000013.mp4", "yoga/xyz_000100_000110.mkv")
    header = "label,youtube_id,time_start,time_end,split,is_cc"
    rows = ("arm wrestling,aBc-_1,3,13,train,0", "yoga,xyz,100,110,validate,0", "yoga,ABC-_1,3,13,test,0")
    path = table(tmp_path / "kinetics.csv", header, *rows)
    source = find_source(tmp_path / "videos", lists=path)
    assert source.layout == "kinetics"
    assert [(c.id, c.group, c.problem) for c in source.clips] == [
        ("arm wrestling/aBc-_1_000003_000013", "aBc-_1", ""),
        ("yoga/xyz_000100_000110", "xyz", ""),
        ("yoga/ABC-_1_000003_000013", "ABC-_1", "no such file"),  # the case of an id counts
    ]
    assert list(source.splits["default"].values()) == ["train", "val", "test"]
    table(path, "youtube_id,time_start,time_end,split", "xyz,100,110,test")
    with pytest.raises(InputError, match="no column label"):
        find_source(tmp_path / "videos", lists=path)


# Frame folders


def tsn(root: Path, frames: int, flows: int) -> Path:
    names = [f"img_{k:05d}.jpg" for k in range(1, frames + 1)]
    return make(root, *names, *(f"flow_{a}_{k:05d}.jpg" for a in "xy" for k in range(1, flows + 1)))


def test_tsn_flow_is_shifted_by_one(tmp_path):
    folder = read_frame_folder(tsn(tmp_path / "a", 5, 5), tmp_path)
    assert [path.name for path in folder.frames] == [f"img_0000{k}.jpg" for k in range(1, 6)]
    assert [path.name for path in folder.flow_x] == [f"flow_x_0000{k}.jpg" for k in range(2, 6)]
    assert [path.name for path in folder.flow_y] == [f"flow_y_0000{k}.jpg" for k in range(2, 6)]


def test_denseflow_and_mmaction_flow_is_in_step(tmp_path):
    for prefix in ("flow_", ""):
        root = tmp_path / f"dir{prefix}"
        make(
            root,
            *(f"img_{k:05d}.jpg" for k in range(4)),
            *(f"{prefix}{a}_{k:05d}.jpg" for a in "xy" for k in range(3)),
        )
        folder = read_frame_folder(root, tmp_path)
        assert [path.name for path in folder.flow_x] == [f"{prefix}x_0000{k}.jpg" for k in range(3)]


@pytest.mark.parametrize("halves", ["uv", "xy"])
@pytest.mark.parametrize("rgb", ["jpegs_256", "."])
@pytest.mark.parametrize("flow", ["tvl1_flow", "."])
def test_feichtenhofer_trees(tmp_path, halves, rgb, flow):
    video = "v_Archery_g01_c02"
    make(tmp_path / rgb / video, *(f"frame{k:06d}.jpg" for k in range(1, 5)))
    for half in halves:
        make(tmp_path / flow / half / video, *(f"frame{k:06d}.jpg" for k in range(1, 4)))
    source = find_source(tmp_path)
    assert (source.layout, source.given_flow, source.classes) == ("frames", True, ["Archery"])
    (clip,) = source.clips
    assert (clip.path, clip.group) == (tmp_path / rgb / video, "v_Archery_g01")
    folder = read_frame_folder(clip.path, tmp_path)
    assert len(folder.frames) == 4
    assert folder.flow_x == [tmp_path / flow / halves[0] / video / f"frame00000{k}.jpg" for k in (1, 2, 3)]
    assert folder.flow_y == [tmp_path / flow / halves[1] / video / f"frame00000{k}.jpg" for k in (1, 2, 3)]


def test_frame_folders_that_do_not_add_up(tmp_path):
    with pytest.raises(DecodeError, match="10 frames but 5 flows"):
        read_frame_folder(tsn(tmp_path / "a", 10, 5), tmp_path)
    (tsn(tmp_path / "b", 5, 0) / "img_00003.jpg").unlink()
    with pytest.raises(DecodeError, match="frame 3 is missing"):
        read_frame_folder(tmp_path / "b", tmp_path)
    (tsn(tmp_path / "c", 5, 5) / "flow_y_00005.jpg").unlink()
    with pytest.raises(DecodeError, match="5 x flows but 4 y flows"):
        read_frame_folder(tmp_path / "c", tmp_path)


def test_real_frame_folders(shared_data, tmp_path):
    source = find_source(shared_data / "frames" / "demo_dataset")
    assert [(clip.id, clip.label) for clip in source.clips] == [
        ("jumping/0001", "jumping"),
        ("running/0001", "running"),
    ]
    assert not source.given_flow
    assert len(read_frame_folder(source.clips[0].path, source.root).frames) == 17
    assert scan(shared_data / "frames") == sorted(
        shared_data / "frames" / name
        for name in ("demo_dataset/jumping/0001", "demo_dataset/running/0001", "mmaction2-imgs")
    )
    # folders of frames may be named in a CSV; one that is missing is a rejection
    folder = shared_data / "frames" / "demo_dataset"
    path = table(tmp_path / "c.csv", "path,label", f"{folder}/jumping/0001,jumping", f"{folder}/jumping/0002,jumping")
    assert [clip.problem for clip in find_source(path).clips] == ["", "no such file"]


def test_digest_follows_content_not_place(tmp_path):
    digests = []
    for name in ("one", "two"):
        make(tmp_path / name, "run/a.mp4", "sit/b.mp4")
        digests.append(find_source(tmp_path / name).digest())
    assert digests[0] == digests[1]
    (tmp_path / "two" / "run" / "a.mp4").write_bytes(b"longer")
    assert find_source(tmp_path / "two").digest() != digests[0]


# Group-disjoint splits


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8)), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.2, 0.5]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 5),
)
def test_group_split_properties(clips, test_fraction, val_fraction, seed):
    labels, groups = [label for label, _ in clips], [f"g{group}" for _, group in clips]
    parts = group_split(labels, groups, test_fraction, val_fraction, seed)
    part_of = {}
    for group, part in zip(groups, parts, strict=True):
        assert part_of.setdefault(group, part) == part  # never in two parts
    assert {label for label, part in zip(labels, parts, strict=True) if part == "train"} == set(labels)
    assert test_fraction > 0 or "test" not in parts
    assert val_fraction > 0 or "val" not in parts
    order = sorted(range(len(clips)), key=lambda k: (k * 7) % len(clips) * len(clips) + k)
    again = group_split([labels[k] for k in order], [groups[k] for k in order], test_fraction, val_fraction, seed)
    assert [parts[k] for k in order] == again  # the order of the clips does not matter


def test_group_split_comes_near_the_fraction_in_every_class(shared_data):
    with open(shared_data / "surveillance-fight" / "clips.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    labels, groups = [row["label"] for row in rows], [row["group"] for row in rows]
    splits = [group_split(labels, groups, 0.3, 0.0, seed) for seed in range(3)]
    assert splits[0] != splits[1] or splits[1] != splits[2]
    for parts in splits:
        for label in ("fight", "noFight"):
            mine = [part for row, part in zip(labels, parts, strict=True) if row == label]
            assert abs(mine.count("test") / len(mine) - 0.3) < 0.05


def test_group_split_of_ten_thousand_groups_is_quick():
    labels = [f"c{k % 101}" for k in range(10_000)]
    parts = group_split(labels, [str(k) for k in range(10_000)], 0.3)
    assert abs(parts.count("test") / 10_000 - 0.3) < 0.02


def test_the_frames_of_one_clip_are_not_a_tree(tmp_path, shared_data):
    with pytest.raises(InputError, match="holds the frames of one clip; give the folder above"):
        find_source(shared_data / "frames" / "mmaction2-imgs")
