"""Imports go down only: the layers of CONTRIBUTING.md, walked over the library's own import statements."""

import ast
from pathlib import Path

import eagle_jax

LAYERS = [
    {"config", "distributed", "numerics", "paths", "script", "sharding", "text"},
    {"tree", "cache", "rope", "sampling", "losses"},
    {"layers", "ranking"},
    {"target", "head"},
    {"draft", "verify"},
    {"cached_drafter", "medusa_drafter", "rejection"},
    {"decoding", "draft_model", "eagle", "history", "medusa", "trie"},
    {"completion", "lookahead", "lookup", "rest"},
    {"generation", "training"},
    {"conversation", "pool", "viz"},
    {"gguf_reader", "families", "files", "weights"},
    {"tokenizers", "embedded", "conversations"},
    {"data", "convert"},
    {"pipeline", "shards", "gguf_file", "repository"},
    {"features"},
    {"checkpoint", "datastore", "loading"},
    {"measure", "runs", "watching"},
    {"journal", "prompts", "round_times", "screening"},
    {"synthesis"},
    {"figures", "peers"},
    {"evaluation", "peer_training", "ranking_fit"},
    {"report"},
]
# Within a layer: what one of its files may import of another.
SIDEWAYS = {("head", "target")}
ROOT = Path(eagle_jax.__file__).parent


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "eagle_jax":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle_jax."):
            names.add(node.module.split(".")[1])
    return names


def test_every_module_has_a_layer():
    assert {path.stem for path in ROOT.glob("*.py")} - {"__init__"} == set().union(*LAYERS)


def test_imports_go_down_only():
    level = {name: index for index, names in enumerate(LAYERS) for name in names}
    wrong = [
        (path.stem, name)
        for path in ROOT.glob("*.py")
        if path.stem != "__init__"
        for name in imports_of(path)
        if level[name] >= level[path.stem] and (path.stem, name) not in SIDEWAYS
    ]
    assert wrong == []


def test_only_the_upper_layers_touch_files():
    for names in LAYERS[:10]:
        for name in names - {"paths"}:
            tree = ast.parse((ROOT / f"{name}.py").read_text())
            calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            assert "open" not in calls and "Path" not in calls, name


def test_scripts_are_not_installed():
    """No top-level module named train or decode may leak into an environment."""
    for script in ("train", "decode"):
        assert not (ROOT / script).exists()
