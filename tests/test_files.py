"""Files are written as a whole or not at all."""

import os

import pytest

from vecenv.files import require_writable, whole_file, write_text


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


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path):
    path = tmp_path / "numbers.json"
    require_writable(path)
    assert not path.exists()
    path.write_text("old")
    require_writable(path)
    assert path.read_text() == "old"
    with pytest.raises(OSError):
        require_writable(path / "below")
