"""Notebooks are committed as they ran: from clean, in order, to the end, with nothing of the machine in them."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_has_run_from_clean(path):
    content = path.read_text()
    cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output["text"]
    assert all(cell["metadata"] == {} for cell in cells)  # no times of execution
    assert not any(place in content for place in ("/home/", "/root/", "/tmp/", "/Users/", "site-packages"))
    assert len(content) < 1_000_000
