"""Files are written as a whole or not at all."""

import io
import os
import secrets
import stat
import zipfile

import numpy as np
import pytest

from vecenv.files import (
    load_arrays,
    require_writable,
    save_arrays,
    whole_file,
    write_text,
)


def test_what_is_written_replaces_the_file(tmp_path):
    path = tmp_path / "numbers.json"
    write_text(path, "old")
    with whole_file(path) as aside:
        assert aside.suffix == ".json" and aside.parent == tmp_path
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_the_file_as_it_was(tmp_path, error):
    path = tmp_path / "numbers.json"
    path.write_text("old")
    with pytest.raises(type(error)) as caught, whole_file(path) as aside:
        aside.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    if isinstance(error, OSError):
        assert str(path) in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "nowhere" / "numbers.json"
    with pytest.raises(FileNotFoundError, match=str(path)):
        write_text(path, "new")


def test_links_stay_links(tmp_path):
    path, link = tmp_path / "numbers.json", tmp_path / "link.json"
    write_text(path, "old")
    link.symlink_to(path)
    write_text(link, "new")
    assert link.is_symlink() and path.read_text() == "new"


def test_pipes_and_devices_are_written_to_themselves():
    write_text(os.devnull, "nothing")
    assert not os.path.isfile(os.devnull)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_keeps_its_mode_also_while_it_is_written(tmp_path):
    path = tmp_path / "secret.json"
    for mode in (0o600, 0o640):
        path.touch()
        path.chmod(mode)
        with whole_file(path) as aside:
            assert mode_of(aside) == mode
            aside.write_text("new")
        assert mode_of(path) == mode
        path.unlink()


def test_new_files_have_the_mode_of_the_user(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new.json", "")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new.json") == 0o640


def test_a_link_that_lies_under_a_name_aside_is_not_followed(tmp_path, monkeypatch):
    other, path = tmp_path / "other", tmp_path / "numbers.json"
    other.write_text("precious")
    (tmp_path / f".numbers.{os.getpid()}.json").symlink_to(other)  # as it was called before
    write_text(path, "new")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".numbers.guessed.json").symlink_to(other)
    with pytest.raises(FileExistsError, match=r"numbers\.json"):
        write_text(path, "newer")
    (tmp_path / ".numbers.guessed.json").unlink()
    (tmp_path / ".numbers.guessed.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        write_text(path, "newer")
    assert (other.read_text(), path.read_text()) == ("precious", "new")
    assert (tmp_path / ".numbers.guessed.json").is_symlink()  # it is not ours to remove


def test_looking_whether_a_file_can_be_written_removes_no_link(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    require_writable(link)
    assert link.is_symlink() and not target.exists()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        require_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        require_writable(tmp_path / "nowhere" / "file")
    with pytest.raises(OSError, match="too long"):
        require_writable(tmp_path / ("x" * 300))


def test_arrays_and_facts_are_read_as_they_were_written(tmp_path):
    path, fortran = tmp_path / "a.npz", np.asfortranarray(np.arange(6.0).reshape(2, 3))
    arrays = [np.zeros((0, 3)), np.array(5), fortran, np.array([True]), np.array(["a", "bc"])]
    arrays += [np.arange(3, dtype=dtype) for dtype in ("u1", "<i2", "<f2", "<f4", ">i4")]
    named = {f"part {k}": array for k, array in enumerate(arrays)}
    facts = {"plain": [1, 2.5, None, True, "x", {"y": []}], "": {}}
    save_arrays(path, named, facts)
    found, told = load_arrays(path)
    assert found.keys() == named.keys() and told == facts
    for name, array in found.items():
        np.testing.assert_array_equal(array, named[name], strict=True)
        assert array.flags.writeable
    assert os.listdir(tmp_path) == ["a.npz"]
    for wrong in ({"a": object()}, {"a": np.array([None])}, {"a": "x", "b": [1, object()]}):
        with pytest.raises(TypeError):
            save_arrays(path, wrong)
    with pytest.raises(TypeError):
        save_arrays(path, {}, {"a": object()})
    assert load_arrays(path)[1] == facts


def archive(path, members):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)


def npy(descr, shape, content=b"", order=False):
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


class Evil:
    def __reduce__(self):
        return os._exit, (7,)


def pickled():
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([Evil()], object), allow_pickle=True)
    return stream.getvalue()


HOSTILE = {
    "pickle": {"a.npy": pickled()},
    "larger than it is": {"a.npy": npy("<f4", (10**12,), bytes(8))},
    "negative": {"a.npy": npy("<f4", (-2,), bytes(8))},
    "too deep": {"a.npy": npy("<f4", "(" * 3000)},
    "records": {"a.npy": npy([("x", "<f4")], (1,), bytes(4))},
    "bools": {"a.npy": npy("|b1", (3,), b"\x01\x02\x00")},
    "no array": {"a.npy": b""},
    "nothing": {},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_archives_that_lie_are_refused(name, tmp_path):
    path = tmp_path / "a.npz"
    archive(path, HOSTILE[name])
    with pytest.raises(ValueError, match=r"a\.npz (is no|has no facts)"):
        load_arrays(path)


def test_texts_that_are_no_facts_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    for text in ("[" * 100_000, "[]", "[1]", '"x"', "nan?", "5"):
        np.savez(path, facts=np.array(text))
        with pytest.raises(ValueError, match=r"a\.npz has no facts"):
            load_arrays(path)
