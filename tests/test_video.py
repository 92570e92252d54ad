"""Reading and writing video files: real odd ones, with OpenCV's own decoder as the oracle for pictures."""

import itertools
import os
import shutil
from fractions import Fraction

import av
import cv2
import numpy as np
import pytest

from fastactrec.data.video import (
    count_frames,
    fit,
    read_frames,
    resize_image,
    video_fps,
    write_video,
)
from fastactrec.errors import DecodeError

# As the READMEs beside the files state them.
ODD_COUNTS = {
    "-video-with-dash-.mp4": 5, "bitmap.mp4": 5, "animated.gif": 4, "transparent.gif": 1,
    "transparent.webm": 150,
    "frame_exceeds_screen.gif": 1, "nasa_13013_rotated.mp4": 17, "no_duration.webm": 74, "av1_video.mkv": 125,
    "video_with_failing_audio.mp4": 280, "discard_first_keyframe.mp4": 25, "test_non_zero_start.mp4": 12,
    "testsrc2_mpeg4.mp4": 1, "h265_video.mp4": 10, "big_buck_bunny_432_433.webm": 24,
    "testsrc2_vp8.webm": 30, "testsrc2_hdr.mp4": 60, "h264_10bits.mp4": 30, "h265_10bits.mp4": 30,
    "testsrc2_odd_height_and_width_444.mp4": 25, "testsrc2_odd_height_and_width_mpeg2.mp4": 10,
    "bt601_full_range.mp4": 60, "bt601_limited_range.mp4": 60, "carphone_distorted.mp4": 120,
}  # fmt: skip
SAMPLE_COUNTS = {
    "v_SoccerJuggling_g23_c01.avi": 240, "RATRACE_wave_f_nm_np1_fr_goo_37.avi": 72, "SOX5yA1l24A.mp4": 332,
    "TrumanShow_wave_f_nm_np1_fr_med_26.avi": 48, "WUzgd7C1pWA.mp4": 327, "mmaction2-test.avi": 164,
    "mmaction2-test.mp4": 300, "mmaction2-demo.mp4": 280, "S001C001P001R001A001_rgb.avi": 103,
    "hmdb51_Turnk_r_Pippi_Michel_cartwheel_f_cm_np2_le_med_6.avi": 83,  # metadata that are not UTF-8
}  # fmt: skip
ODD_REASONS = {
    "result.webm": "empty file",
    "nasa_13013.mp4.audio.mp3": "audio only",
    "sine_mono_s16.wav": "audio only",
    "README.md": "Invalid data",
}


@pytest.mark.parametrize("name", ODD_COUNTS)
def test_odd_media_give_the_frames_of_their_readme(shared_data, name):
    path = shared_data / "odd-media" / name
    frames = list(read_frames(path, size=(32, None)))
    assert len(frames) == ODD_COUNTS[name] == count_frames(path)
    assert all(frame.dtype == np.uint8 and frame.shape == frames[0].shape for frame in frames)
    assert min(frames[0].shape[:2]) == 32
    assert video_fps(path) > 0


@pytest.mark.parametrize("name", SAMPLE_COUNTS)
def test_clips_of_public_datasets(shared_data, name):
    assert count_frames(shared_data / "dataset-samples" / name) == SAMPLE_COUNTS[name]


@pytest.mark.parametrize("name", ODD_REASONS)
def test_unusable_files_say_why(shared_data, name):
    path = shared_data / "odd-media" / name
    with pytest.raises(DecodeError) as caught:
        list(read_frames(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert ODD_REASONS[name] in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DecodeError, match="No such file"):
        next(read_frames(tmp_path / "none.mp4"))
    with pytest.raises(DecodeError, match=r"Is a directory|Invalid data"):
        next(read_frames(tmp_path))


def _opencv_frames(path, count):
    capture = cv2.VideoCapture(str(path))
    frames = [capture.read()[1][:, :, ::-1] for _ in range(count)]
    capture.release()
    return frames


@pytest.mark.parametrize(
    "name",
    [
        "odd-media/nasa_13013_rotated.mp4",
        "surveillance-fight/fight/fi001.mp4",
        "dataset-samples/mmaction2-test.avi",
    ],
)
def test_pictures_are_opencvs_also_when_rotated(shared_data, name):
    path = shared_data / name
    expected = _opencv_frames(path, 5)  # OpenCV turns pictures upright by itself
    height, width = expected[0].shape[:2]
    if "rotated" in name:
        assert (width, height) == (270, 480)
    for ours, theirs in zip(read_frames(path, size=(width, height)), expected, strict=False):
        assert ours.shape == theirs.shape
        # Rounding and the placement of chroma differ: worst mean seen 0.74 levels; a wrong turn is off by 11.
        assert np.abs(ours.astype(int) - theirs).mean() < 1.5


def test_range_and_step_count_decoded_frames(shared_data):
    path = shared_data / "surveillance-fight" / "fight" / "fi001.mp4"
    everything = list(read_frames(path, size=(32, None)))
    part = list(read_frames(path, size=(32, None), start=5, end=20, step=4))
    assert np.array_equal(part, everything[5:20:4])
    assert count_frames(path, start=5, end=20, step=4) == 4
    assert len(list(read_frames(path, size=(32, None), start=50, end=500))) == len(everything) - 50
    with pytest.raises(DecodeError, match="no frame in 500 to 600"):
        list(read_frames(path, start=500, end=600))


def test_reading_is_lazy(shared_data):
    frames = read_frames(shared_data / "dataset-samples" / "WUzgd7C1pWA.mp4")
    assert next(frames).shape == (256, 340, 3)
    frames.close()


def test_truncated_files(shared_data, tmp_path):
    mp4 = (shared_data / "surveillance-fight" / "fight" / "fi001.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(mp4[: len(mp4) // 2])
    with pytest.raises(DecodeError, match="truncated, or not a video"):
        list(read_frames(tmp_path / "cut.mp4"))
    avi = (shared_data / "dataset-samples" / "TrumanShow_wave_f_nm_np1_fr_med_26.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(avi[: len(avi) // 2])
    assert 10 < count_frames(tmp_path / "cut.avi") < 48  # AVI ends where it ends: what decodes counts


@pytest.mark.parametrize("name", [b"-dash: colon %03d #.mp4", b"h\xe9las.mp4"])
def test_names_that_trip_others(tmp_path, shared_data, name):
    path = os.path.join(os.fsencode(tmp_path), name)
    shutil.copy(shared_data / "odd-media" / "bitmap.mp4", path)
    assert count_frames(os.fsdecode(path)) == 5


def test_variable_frame_rate_keeps_every_frame(tmp_path):
    path = tmp_path / "vfr.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90)
        for k, pts in enumerate([0, 1, 7, 8, 30, 31, 90, 200]):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * k, np.uint8), format="rgb24")
            frame.pts, frame.time_base = pts, Fraction(1, 90)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    levels = [frame.mean() for frame in read_frames(path, size=(64, 48))]
    assert levels == pytest.approx([20 * k for k in range(8)], abs=4)


def test_fit():
    assert fit(1920, 1080, (256, None)) == (455, 256)
    assert fit(1080, 1920, (256, None)) == (256, 455)
    assert fit(5, 5, (32, None)) == (32, 32)
    assert fit(1920, 1080, (340, 256)) == (340, 256)


def test_resize_image_does_not_alias():
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    assert resize_image(image, (60, 40)) is image
    smaller = resize_image(image, (20, None))
    assert smaller.shape == (20, 30, 3)
    # Bilinear on half the size, with a kernel twice as wide, is near the mean of 2x2 pixels: no aliasing.
    boxes = image.reshape(20, 2, 30, 2, 3).mean((1, 3))
    picked = image[::2, ::2].astype(float)
    assert np.abs(smaller - boxes).mean() < np.abs(smaller - picked).mean() / 2


@pytest.mark.parametrize(("height", "width"), [(48, 64), (33, 47)])
def test_write_then_read(tmp_path, height, width):
    ramp = np.linspace(0, 200, width, dtype=np.uint8)
    frames = [np.broadcast_to(ramp[None, :, None] + 5 * k, (height, width, 3)).astype(np.uint8) for k in range(9)]
    path = tmp_path / "-a:b.mp4"
    write_video(path, iter(frames), fps=12.5)
    assert os.listdir(tmp_path) == [path.name]
    assert video_fps(path) == 12.5
    even = (width + width % 2, height + height % 2)
    back = [frame[:height, :width] for frame in read_frames(path, size=even)]
    assert np.abs(np.array(back, dtype=int) - frames).mean() < 2


def test_a_writing_that_fails_leaves_nothing(tmp_path):
    good = np.zeros((16, 16, 3), np.uint8)
    for frames in ([], [good, np.zeros((8, 16, 3), np.uint8)], [good.astype(float)]):
        with pytest.raises(ValueError, match="write_video"):
            write_video(tmp_path / "x.mp4", frames)
    with pytest.raises(ZeroDivisionError):
        write_video(tmp_path / "x.mp4", (good // 0 if k else good for k in map(_or_fail, itertools.count())))
    assert os.listdir(tmp_path) == []


def _or_fail(k):
    return 1 // (3 - k) and 0
