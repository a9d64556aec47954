"""The container files say what the code says, and their tools find nothing wrong. No image is built here."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Any

import pytest
import yaml

from hatch_build import ROOMS
from infra.stack import doctor, prefect_server, s3, s3_binary
from infra.stack.doctor import NEEDED_SHM
from infra.stack.kafka import KafkaService
from infra.stack.kafka_config import JVM_OPTIONS
from infra.stack.paths import StackPaths
from infra.stack.prefect_server import PrefectService
from infra.stack.s3 import Credentials, S3Access, S3Service
from infra.stack.services import ServiceContext
from schemas.loading import load_run_file
from schemas.runspec import PrometheusSection
from tests.promtools import promtool

ROOT = Path(__file__).parents[2]
HERE = ROOT / "infra" / "containers"
IMAGES = ["Dockerfile.cpu", "Dockerfile.gpu"]
DOCKERFILES = [*IMAGES, "Dockerfile.s3"]
NEEDED = {"STREAMRL_S3_ACCESS_KEY": "key", "STREAMRL_S3_SECRET_KEY": "secret", "GRAFANA_PASSWORD": "word"}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def filled_in(**given: str) -> dict[str, Any]:
    """The services of compose.yaml, with its variables replaced as compose does it."""

    def value(found: re.Match[str]) -> str:
        if given.get(found[1]):
            return given[found[1]]
        assert found[2] == "-", f"{found[1]}: {found[3]}"
        return found[3]

    services = yaml.safe_load(VARIABLE.sub(value, (HERE / "compose.yaml").read_text()))["services"]
    return dict(services)


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its words in one line."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (HERE / name).read_text(), flags=re.M))
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def tool(*words: str | Path) -> None:
    """Run a tool of this environment, which must find nothing wrong."""
    command = [str(Path(sys.executable).with_name(str(words[0]))), *map(str, words[1:])]
    done = subprocess.run(command, text=True, capture_output=True, check=False, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr


def checked_compose(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, words)]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    return subprocess.run(command, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing_in_a_dockerfile(name: str) -> None:
    tool("hadolint", "--no-color", name)


def test_compose_files_are_as_the_compose_specification_says(tmp_path: Path) -> None:
    done = checked_compose(HERE / "compose.yaml", HERE / "compose.gpu.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((HERE / "compose.yaml").read_text().replace("shm_size", "shm_sise"))
    assert "shm_sise" in checked_compose(wrong).stdout


def test_yamllint_finds_nothing() -> None:
    rules = (
        "{line-length: {max: 120}, document-start: disable, braces: {max-spaces-inside: 0}, "
        "comments: {min-spaces-from-content: 1}}"
    )
    tool("yamllint", "--strict", "-d", f"{{extends: default, rules: {rules}}}", ".")


def test_promtool_accepts_the_configuration_as_it_is_mounted(tmp_path: Path) -> None:
    for volume in filled_in(**NEEDED)["prometheus"]["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            shutil.copy(HERE / source, tmp_path / Path(target).name)
    done = subprocess.run(
        [promtool(), "check", "config", str(tmp_path / "prometheus.yaml")],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "rules found" in done.stdout, done.stdout + done.stderr


def test_kafka_has_the_version_and_the_options_of_the_local_one() -> None:
    kafka = filled_in(**NEEDED)["kafka"]
    pom = Xml.parse(ROOT / "infra/stack/kafka_jars/pom.xml")
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    versions = {
        one.findtext("m:artifactId", namespaces=space): one.findtext("m:version", namespaces=space)
        for one in pom.iterfind(".//m:dependency", space)
    }
    assert kafka["image"] == f"apache/kafka:{versions['kafka_2.13']}"
    env = kafka["environment"]
    assert [*env.pop("KAFKA_HEAP_OPTS").split(), *env.pop("KAFKA_JVM_PERFORMANCE_OPTS").split()] == [
        *JVM_OPTIONS
    ]
    # Other variables would be appended to server.properties, and win there.
    assert env == {}
    settings = dict(
        line.split("=", 1) for line in (HERE / "kafka/server.properties").read_text().splitlines()[1:]
    )
    assert settings["advertised.listeners"] == f"PLAINTEXT://kafka:{KafkaService.usual_port}"
    assert f"kafka:{settings['log.dirs']}" in kafka["volumes"]
    assert f"localhost:{KafkaService.usual_port}" in kafka["healthcheck"]["test"]


def test_s3_is_built_and_started_as_the_local_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STREAMRL_LISTEN", raising=False)
    steps = instructions("Dockerfile.s3")
    assert ("RUN", f"CGO_ENABLED=0 GOBIN=/out go install {s3_binary.MODULE}") in steps
    service = filled_in(**NEEDED)["s3"]
    assert service["image"].endswith(f":{s3_binary.VERSION}")
    paths = StackPaths(home=tmp_path, cache=tmp_path)
    paths.make()
    local = S3Service().launch(ServiceContext(paths), S3Service.usual_port)
    places = {
        f"127.0.0.1:{S3Service.usual_port}": f":{S3Service.usual_port}",
        str(paths.s3 / "meta"): "/data/meta", str(paths.s3 / "objects"): "/data/objects",
    }  # fmt: skip
    command = json.loads(dict(steps)["CMD"])
    asked = command.index("--health")
    healthy_at = command[asked + 1]
    del command[asked : asked + 2]
    assert command == [places.get(word, word) for word in local.command[1:]]
    assert service["environment"].keys() == {key for key in local.env if key.startswith(("ROOT_", "VGW_"))}
    assert service["environment"]["VGW_REGION"] == s3.REGION
    assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{S3Service.usual_port}{healthy_at}"
    made = [words for step, words in steps if step == "RUN" and "mkdir" in words]
    assert f"/data/objects/{s3.BUCKET} /data/meta" in made[0], "the bucket is made with the image"


def test_prefect_is_ours_with_our_settings(tmp_path: Path) -> None:
    services = filled_in(**NEEDED)
    server, run = services["prefect"], services["run"]
    paths = StackPaths(home=Path("/var/lib/streamrl"), cache=tmp_path)
    here = prefect_server.client_env(paths, "http://prefect:4200/api")
    del here["PREFECT_WORKER_QUERY_SECONDS"]  # there is no worker
    assert here.items() <= run["environment"].items()
    local = {**prefect_server.server_env(), "PREFECT_HOME": here["PREFECT_HOME"]}
    del local["PYTHONUNBUFFERED"]  # the image has it
    assert local.items() <= server["environment"].items()
    port = PrefectService.usual_port
    assert server["command"] == ["server", "start", "--host", "0.0.0.0", "--port", str(port)]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert server["environment"]["PREFECT_SERVER_UI_API_URL"] == f"http://127.0.0.1:{port}/api"
    assert server["image"] == run["image"] and server["build"] == run["build"]


def test_the_run_uses_these_services(monkeypatch: pytest.MonkeyPatch) -> None:
    run = filled_in(**NEEDED)["run"]
    access = S3Access(f"http://s3:{S3Service.usual_port}", s3.BUCKET, Credentials("key", "secret"))
    wanted = {name: value for name, value in access.env().items() if name.startswith("AWS_")}
    assert wanted.items() <= run["environment"].items()
    command, file, *rest = shlex.split(run["command"])
    assert (command, rest[::2]) == ("run", ["--set"] * 3)
    spec = load_run_file(ROOT / "examples" / Path(file).name, rest[1::2])
    assert spec.placement.kafka.bootstrap_servers == f"kafka:{KafkaService.usual_port}"
    assert spec.placement.store.startswith(f"{access.url}/")
    assert spec.prometheus == PrometheusSection()
    assert run["environment"]["STREAMRL_LISTEN"] == run["hostname"] == "run"
    (job,) = yaml.safe_load((HERE / "prometheus.yaml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == ([run["hostname"]], PrometheusSection().port)
    (local,) = yaml.safe_load((ROOT / "infra/monitoring/prometheus.yaml").read_text())["scrape_configs"]
    assert job["job_name"] == local["job_name"], "the alert rules name the job"
    assert _bytes(run["shm_size"]) >= 4 * NEEDED_SHM


def _bytes(size: str) -> int:
    assert size.endswith("gb")
    return int(size.removesuffix("gb")) << 30


def test_a_run_file_and_words_of_the_user_take_the_examples_place() -> None:
    given = {"RUN_FILES": "/home/me/three", "RUN_FILE": "run.yaml", "RUN_ARGUMENTS": "--resume three-1"}
    run = filled_in(**NEEDED, **given)["run"]
    words = shlex.split(run["command"])
    assert words[:2] == ["run", "/run-files/run.yaml"] and words[-2:] == ["--resume", "three-1"]
    assert "/home/me/three:/run-files:ro" in run["volumes"]


def test_the_example_of_env_names_every_variable_and_holds_no_secret() -> None:
    text = (HERE / ".env.example").read_text()
    asked = {found[1]: found[2] for found in VARIABLE.finditer((HERE / "compose.yaml").read_text())}
    named = dict(re.findall(r"^(#?\w+)=(.*)$", text, re.M))
    assert (
        {name for name, how in asked.items() if how == "?"}
        == {n for n in named if n[0] != "#"}
        == NEEDED.keys()
    )
    assert {name for name, how in asked.items() if how == "-"} == {n[1:] for n in named if n[0] == "#"}
    assert not any(named[name] for name in NEEDED)
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "infra/containers/.env"], cwd=ROOT, check=False, env=os.environ
    )
    assert ignored.returncode in (0, 128), "git would take .env with its passwords"  # 128: no repository


def test_every_service_is_guarded_and_only_loopback_ports_are_published() -> None:
    for name, service in filled_in(**NEEDED).items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert "healthcheck" in service or name == "run", name
        assert "privileged" not in service and service.get("user") not in ("root", "0"), name
        for depended, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, (name, depended)


def test_what_is_mounted_is_there_and_every_volume_is_declared() -> None:
    declared = yaml.safe_load((HERE / "compose.yaml").read_text())["volumes"]
    used = set()
    for service in filled_in(**NEEDED).values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (HERE / source).exists() and volume.endswith(":ro"), volume
            else:
                used.add(source)
        if build := service.get("build"):
            assert (HERE / build["context"] / build["dockerfile"]).is_file()
    assert used == declared.keys()


def test_grafana_finds_prometheus_and_the_board() -> None:
    services = filled_in(**NEEDED)
    (source,) = yaml.safe_load((HERE / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (boards,) = yaml.safe_load((HERE / "grafana/boards.yaml").read_text())["providers"]
    targets = {Path(volume.split(":")[1]) for volume in services["grafana"]["volumes"]}
    assert Path(boards["options"]["path"]) / "board.json" in targets
    provisioning = Path("/etc/grafana/provisioning")
    assert {provisioning / "datasources/streamrl.yaml", provisioning / "dashboards/streamrl.yaml"} < targets


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_our_python_and_our_extras(name: str) -> None:
    steps = instructions(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = project["tool"]["mypy"]["python_version"]
    assert f"--python-version {version}" in (ROOT / "Makefile").read_text()
    bases = [words.split()[0] for step, words in steps if step == "FROM"]
    assert bases == [f"python:{version}-slim-bookworm"] * 2
    install = next(words for _, words in steps if "-r pyproject.toml" in words)
    extras = re.findall(r"--extra (\w+)", install)
    assert set(extras) < project["project"]["optional-dependencies"].keys()
    assert extras[0] == name.partition(".")[2]
    for file in re.findall(r"requirements/\S+", install):
        assert (ROOT / file).is_file()
    assert project["project"]["scripts"]["streamrl"] and ("ENTRYPOINT", '["tini", "--", "streamrl"]') in steps


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_container_has_a_user_of_its_own_who_owns_the_folders_of_volumes(name: str) -> None:
    steps = instructions(name)
    last = len(steps) - [step for step, _ in reversed(steps)].index("FROM")
    made = " ".join(words for step, words in steps[last:] if step == "RUN")
    ((user),) = [words for step, words in steps[last:] if step == "USER"]
    assert user == "10001" and re.search(r"(--uid|-u) 10001\b", made)
    services = filled_in(**NEEDED)
    ours = ["s3"] if name.endswith("s3") else ["run", "prefect"]
    for volume in (one for service in ours for one in services[service]["volumes"]):
        if volume[0] not in "./":
            assert re.search(rf"{volume.split(':')[1]}\b", made), volume


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_is_in_the_context_and_all_of_the_wheel_is(name: str) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed >= {
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "streamrl",
        "examples",
        *ROOMS,
    }
    assert all((ROOT / one).exists() for one in allowed)
    assert lines.index("*") < min(lines.index(f"!{one}") for one in allowed)
    assert any(fnmatch.fnmatch("infra/containers/.env", line) for line in lines), "passwords stay outside"
    for step, words in instructions(name):
        if step == "COPY" and "--from" not in words:
            source = words.split()[0]
            assert source == "." or source in allowed


def test_the_two_images_differ_only_in_their_packages() -> None:
    cpu, gpu = (instructions(name) for name in IMAGES)
    assert len(cpu) == len(gpu)
    other = {step for one, (step, words) in zip(cpu, gpu, strict=True) if one != (step, words)}
    assert other == {"RUN", "ENV"}


def test_the_allocator_that_the_doctor_asks_for_is_in_the_images() -> None:
    package = re.search(r"apt install (\S+):", doctor._tcmalloc().fix)
    assert package
    for name in IMAGES:
        assert any(package[1] in words.split() for step, words in instructions(name) if step == "RUN"), name
