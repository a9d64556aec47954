"""Documents that are made from the code, links between documents, and the Python that they show."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from consumers.learners.optimizing import Stepped
from consumers.losses.objective import LossStats
from consumers.steps.step_metrics import OptimizerUpdate, step_metrics
from docs.generate.__main__ import DOCS, generated
from docs.generate.topics import messages_of
from flows.cli.shared.talk import EXIT_CODES
from flows.view.line_files import BEHIND
from flows.view.metric_rows import step_row, with_rates
from infra.kafka_security import KAFKA_OPTIONS
from infra.roles.entry import DONE, FAILED, LASTING, REPLACED, STOPPED
from schemas.loading import load_run_file
from schemas.messages import StepRecord
from schemas.metrics import METRICS
from schemas.topics import Topics
from tests.factories import make_spec
from tests.fakes.fill import fill
from tests.training import rows_of

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_generated_pages_are_current() -> None:
    for name, text in generated().items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is old: run python -m docs.generate"


def test_every_topic_has_its_messages() -> None:
    topics = [topic.name.partition(".")[2] for topic in Topics("run", 3).all()]
    kinds = [kind for topic in topics for kind in messages_of(topic)]
    assert all(messages_of(topic) for topic in topics) and len(kinds) == len(set(kinds)) == 15


def _placeholder(found: re.Match[str]) -> str:
    return f"{found[1]}_{'N' if found[1] == 'tokens_class' else 'NAME'}"


def test_every_metric_is_explained() -> None:
    spec = make_spec(loss="ppo")
    rows = rows_of(spec)
    samples = [replace(row.sample, reward_parts={"word": 0.2}) for row in rows]
    stats = [LossStats(0.0, 1, 0, 0.0, 0.0, 1, 0.0, 0, 0.0, entropy_tokens=1, returns=1.0)]
    done = OptimizerUpdate(Stepped(1.0))
    found = step_metrics(samples, [], stats, iteration=0, update=done, compute_s=1.0, waited_s=1.0)
    record = fill(
        StepRecord, run="test-1", metrics=found, groups=np.zeros(2), lengths=np.full(2, 7),
        rewards=np.full(2, 0.5), versions=np.zeros(2), predicted=np.full(2, 5.0),
    )  # fmt: skip
    row = with_rates([step_row(record)])[0]
    names = {re.sub(r"^(tokens_class|reward_part)_.*", _placeholder, name) for name in (*row, *found)}
    assert names | {BEHIND, "length_balance"} == set(METRICS)  # test_length_balance has that one


def test_the_site_is_built_and_its_links_and_anchors_lead_somewhere(tmp_path: Path) -> None:
    """mkdocs is strict: it fails for links and anchors that lead nowhere, and for a page in no menu."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "reference" / "metrics" / "index.html").exists()
    outside = re.findall(r'(?:src|href)="(https?://[^"]+)"', (tmp_path / "index.html").read_text())
    assert all("squidfunk" in one for one in outside), "the page fetches something from elsewhere"


def test_examples_are_valid() -> None:
    for file in (ROOT / "examples").rglob("*.yaml"):
        if file.parent.name == "prefect":
            continue  # deployments
        load_run_file(file)


def test_links_lead_somewhere() -> None:
    for file in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_snippets_import_what_is_there() -> None:
    snippets = [
        one
        for file in PAGES
        for one in re.findall(r"^```python[^\n]*\n(.*?)^```", file.read_text(), re.M | re.S)
    ]
    assert len(snippets) > 1
    for node in (node for snippet in snippets for node in ast.walk(ast.parse(snippet))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


OURS_ALONE = {
    "TEAM",
    "SERVICE",
    "PROBE",
    "S3_ENDPOINT",
    "BOOTSTRAP_SERVERS",
    "LAST_WORDS",
}  # for our own processes


def test_every_environment_variable_is_explained() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    rooms = ("flows", "consumers", "producers", "schemas", "infra")
    code = "".join(file.read_text() for room in rooms for file in (ROOT / room).rglob("*.py"))
    names = set(re.findall(r"STREAMRL_([A-Z0-9_]*[A-Z0-9])\b", code))
    names |= {f"KAFKA_{option}" for option in KAFKA_OPTIONS}
    names |= {f"{service}_PORT" for service in ("KAFKA", "S3", "PREFECT")}
    assert len(names) > 25
    missing = sorted(name for name in names - OURS_ALONE if f"`STREAMRL_{name}`" not in page)
    assert not missing, f"docs/reference/environment.md lacks STREAMRL_{missing}"


def test_every_exit_code_is_on_the_page_about_errors() -> None:
    page = (DOCS / "how-to" / "when-something-is-wrong.md").read_text()
    table = page[page.index("## Exit codes") :]
    assert [int(found) for found in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == sorted(EXIT_CODES)
    roles = {DONE: "done", FAILED: "another start may go well", STOPPED: "told to stop",
             REPLACED: "replaced by a newer start", LASTING: "the error lasts"}  # fmt: skip
    flat = " ".join(page.split())
    assert all(f"{code} ({meaning})" in flat for code, meaning in roles.items())
