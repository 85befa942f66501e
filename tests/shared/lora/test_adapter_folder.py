"""Files of an adapter that are written while they are read."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_folder import read_unchanged


def read_while(folder: Path, changes: Sequence[Callable[[], object]]) -> tuple[str, int]:
    """The text and the number of reads. changes: what happens in each read, behind half of the file."""
    rest, count = list(changes), 0

    def read() -> str:
        nonlocal count
        count += 1
        text = (folder / "adapter_model.safetensors").read_text()[:2]
        if rest:
            rest.pop(0)()
        return text + (folder / "adapter_model.safetensors").read_text()[2:]

    return read_unchanged(folder, read), count


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_text("aaaa")
    os.utime(tmp_path / "adapter_model.safetensors", ns=(0, 0))
    return tmp_path / "adapter_model.safetensors"


def test_one_version_is_read(file: Path) -> None:
    def replace() -> None:
        (file.parent / "new").write_text("cccc")
        os.utime(file.parent / "new", ns=(0, 0))
        (file.parent / "new").rename(file)

    assert read_while(file.parent, []) == ("aaaa", 1)
    assert read_while(file.parent, [(file.parent / "README.md").touch]) == ("aaaa", 1), "it is not read"
    assert read_while(file.parent, [lambda: file.write_text("bbbb")]) == ("bbbb", 2), "in place, of equal size"
    os.utime(file, ns=(0, 0))
    assert read_while(file.parent, [replace]) == ("cccc", 2)


def test_a_file_that_is_written_again_and_again_is_refused(file: Path) -> None:
    changes = [lambda: file.write_text("bb"), lambda: file.write_text("ccccc")]
    with pytest.raises(AdapterError, match=r"^its files were changed while they were read, twice$"):
        read_while(file.parent, changes)


def test_a_broken_file_is_read_again_only_if_it_was_changed(file: Path) -> None:
    causes = list[str]()

    def read() -> None:
        causes.append(file.read_text())
        if len(causes) == 1:
            file.write_text("bb")
        raise AdapterError(causes[-1])

    with pytest.raises(AdapterError, match=r"^bb$"):
        read_unchanged(file.parent, read)
    with pytest.raises(AdapterError, match=r"^bb$"):
        read_unchanged(file.parent, read)
    assert causes == ["aaaa", "bb", "bb"]
