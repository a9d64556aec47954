"""Checks the files and places that a run file names, before anything is started."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path

from flows.run.dealt_gpus import DealtGpus
from flows.run.inspection.engine_arguments import wrong_options
from flows.run.inspection.engine_differences import BFLOAT16_ALONE
from flows.run.inspection.model import (
    BadModel,
    config_of,
    longest_context,
    no_tensors,
    wrong_config,
    wrong_tensors,
)
from flows.run.inspection.servers import most_generators
from flows.run.inspection.store_and_broker import wrong_folder
from flows.run.locations import store_url
from flows.run.request import RunRequest
from infra.bus import LARGEST_RECORD
from infra.gpus import visible_gpus
from infra.hub import is_hub_name, model_folder, why_not
from infra.route_shapes import followed_shape, route_shape
from infra.weights.adapter_tensors import check_targets
from infra.weights.eight_bits import ON_GPUS, is_rounded
from infra.weights.expert_names import expert_tensor
from infra.weights.folder import ModelFolder
from infra.weights.slices import Slicing
from infra.weights.weights_error import WeightsError
from producers.engines.engine import EngineError
from producers.engines.served_engine import ServedSettings
from producers.engines.shared_prompts import sharing_asked
from producers.engines.vllm_engine import VllmSettings
from schemas.expert_routes import RouteShape
from schemas.loading import RunFileError, load_run_file
from schemas.runspec import RunSpec

_TOKEN_BYTES = 8  # of a sample's record, for a token and its logprob
_SAMPLE_BYTES = 64 << 10  # of a sample's record, for all else


def check(request: RunRequest) -> RunSpec:
    """Return the run spec. Raises RunFileError if something that it names is missing or unfit.

    Changes nothing and imports none of the user's code.
    """
    spec = load_run_file(request.runfile, request.overrides)
    problems = problems_of(spec)
    if problems:
        raise RunFileError("\n".join(f"{request.runfile}: {problem}" for problem in problems))
    return spec


def problems_of(spec: RunSpec) -> list[str]:
    """Return what is wrong with the files and places that a run file names, as far as a quick look tells."""
    found = [
        *_model_problems(spec),
        *_task_problems(spec),
        *_backbone_problems(spec),
        *_place_problems(spec),
        *_gpu_problems(spec),
        *_server_problems(spec),
        *_option_problems(spec),
    ]
    return list(dict.fromkeys(found))  # problems and reward may lack the same file


def _place_problems(spec: RunSpec) -> list[str]:
    urls = {"placement.store": store_url(spec.placement.store)}
    urls |= {
        f"placement.sites.{name}.cache": site.cache
        for name, site in spec.placement.sites.items()
        if not site.elsewhere
    }
    return [wrong for field, url in urls.items() if (wrong := wrong_folder(field, url))]


def _gpu_problems(spec: RunSpec) -> list[str]:
    generators = spec.placement.generators if spec.generates else 0
    problem = DealtGpus.of_run(spec, visible_gpus()).problem(generators)
    return [problem] if problem else []


def _server_problems(spec: RunSpec) -> list[str]:
    settings = spec.generator
    if not isinstance(settings, ServedSettings) or len(settings.urls) >= (needed := most_generators(spec)):
        return []
    named = f"generator.urls names {len(settings.urls)} of the {needed} servers that are needed"
    return [f"{named}: each generator (placement) has one of its own"]


def _option_problems(spec: RunSpec) -> list[str]:
    settings = spec.generator
    if not isinstance(settings, VllmSettings) or not spec.generates:
        return []
    return wrong_options(settings.options, settings.slots)


def _model_problems(spec: RunSpec) -> list[str]:
    if spec.model.build:
        return _function_problems("model.build", spec.model.build, "build")
    path = spec.model.path or ""
    folder = model_folder(path)
    if folder is None:
        if not is_hub_name(path):
            return [f"model.path: there is no folder {path}"]
        return [f"model.path: {reason}"] if (reason := why_not(path)) else []
    if not (folder / "config.json").is_file():
        return [f"model.path: {folder} has no config.json: it is not a Hugging Face model"]
    if damaged := [*wrong_config(folder), *wrong_tensors(folder), *no_tensors(folder)]:
        return [f"model.path: {one}" for one in damaged]
    return _folder_problems(spec, folder)


def _folder_problems(spec: RunSpec, folder: Path) -> list[str]:
    """Check a model that is on this machine against the run file."""
    return [
        *_context_problems(spec, folder), *_lora_problems(spec, folder), *_route_problems(spec, folder),
        *_slicing_problems(spec, folder), *_rounding_problems(spec, folder),
        *_sharing_problems(spec, folder), *_dtype_problems(spec, folder),
    ]  # fmt: skip


def _lora_problems(spec: RunSpec, folder: Path) -> list[str]:
    """Check the adapter by the model's files. The trainer, which knows the linear layers, checks again."""
    if spec.model.lora is None:
        return []
    if importlib.util.find_spec("peft") is None:
        return ["model.lora: peft is not installed: pip install 'streamrl[peft]'"]
    try:
        shapes = ModelFolder(folder).shapes
        layers = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
        if not isinstance(spec.model.lora.targets, str):
            check_targets(spec.model.lora.targets, [one for one in layers if _may_have(one)], folder)
    except WeightsError as error:
        return [str(error)]
    return []


def _slicing_problems(spec: RunSpec, folder: Path) -> list[str]:
    """Check that the ranks of an engine can divide the model among them."""
    layout = spec.generator.layout
    if layout.ranks == 1 or not spec.generates:
        return []
    try:
        slicing, shapes = Slicing.of(folder, layout), ModelFolder(folder).shapes
    except WeightsError as error:
        setting = "tensor" if layout.tensor > 1 else "pipeline"
        return [f"generator.{setting}_parallel: {error}"]
    return [f"{wrong} ({folder})" for wrong in slicing.problems(shapes)]


def _rounding_problems(spec: RunSpec, folder: Path) -> list[str]:
    """Check that the model has layers which engines hold in eight bits, if they shall."""
    if not spec.generator.eight_bits or not spec.generates:
        return []
    if route_shape(str(folder)) is not None:
        why = "it is a mixture of experts, and experts are not held in eight bits"
    elif not any(is_rounded(name, shape) for name, shape in ModelFolder(folder).shapes.items()):
        why = "it has no layer of those that are held in eight bits, such as q_proj"
    elif spec.model.dtype != ON_GPUS and visible_gpus():
        return [f"model.dtype: on GPUs generator.quantization needs {ON_GPUS}; it is {spec.model.dtype}"]
    else:
        return []
    return [f"generator.quantization: {folder}: {why}. Set none"]


def _sharing_problems(spec: RunSpec, folder: Path) -> list[str]:
    """Check that samples may share what was computed of their prompt, if they shall."""
    settings = spec.generator
    if not isinstance(settings, VllmSettings) or not spec.generates:
        return []
    routed = followed_shape(str(folder), spec) is not None
    try:
        sharing_asked(settings.prefix_caching, invariant=settings.batch_invariant, routed=routed)
    except EngineError as error:
        return [str(error)]
    return []


def _may_have(layer: str) -> bool:
    """Whether an adapter may be for a layer: for no experts, and for no router of theirs."""
    if layer.endswith(("embed_tokens", "lm_head", ".gate")):
        return False
    return expert_tensor(f"{layer}.weight") is None


def _backbone_problems(spec: RunSpec) -> list[str]:
    folder = spec.lengths.backbone
    if folder == "none":
        return []
    if (Path(folder) / "config.json").is_file():
        return [f"lengths.backbone: {one}" for one in wrong_tensors(Path(folder))]
    return [f"lengths.backbone: {folder} is not a folder with a Hugging Face model (it has no config.json)"]


def check_context(spec: RunSpec, model: Path) -> None:
    """Raise RunFileError if the run file asks too much of a model. Called once the model is there."""
    if problems := [*no_tensors(model), *_folder_problems(spec, model)]:
        raise RunFileError("\n".join(problems))


def _context_problems(spec: RunSpec, folder: Path) -> list[str]:
    try:
        limit = longest_context(folder)
    except BadModel as error:
        return [str(error)]
    longest = spec.sampling.max_prompt_tokens + spec.sampling.max_tokens
    if limit is None or longest <= limit:
        return []
    problem = (
        f"sampling: max_prompt_tokens + max_tokens = {longest}, but the model in {folder} holds {limit} "
        "tokens (max_position_embeddings of its config): lower one of them"
    )
    return [problem]


def _dtype_problems(spec: RunSpec, folder: Path) -> list[str]:
    try:
        kind = config_of(folder).get("model_type")
    except BadModel:
        return []  # others say it
    if kind not in BFLOAT16_ALONE or spec.model.dtype == "bfloat16":
        return []
    return [f"model.dtype: it is {spec.model.dtype}, and vLLM has parts of a {kind} in bfloat16: set that"]


def _route_problems(spec: RunSpec, folder: Path) -> list[str]:
    """Check that samples have routes, and that a record on Kafka holds those of the longest one."""
    shape, tokens = followed_shape(str(folder), spec), spec.longest_sample
    records = spec.generator.records_routes or not spec.generator.is_read  # code that is not ours may do so
    if shape is not None and spec.generates and not records:
        problem = (
            f"model.follow_routes: the model in {folder} is a mixture of experts, and generator.engine "
            f"{spec.generator.engine} does not record which ones it takes: set it to false"
        )
        return [problem]
    if shape is None or (size := _sample_bytes(shape, tokens)) <= LARGEST_RECORD:
        return []
    without = _sample_bytes(shape, 0)
    most = (LARGEST_RECORD - without) * tokens // (size - without)
    problem = (
        f"sampling: a sample may have max_prompt_tokens + max_tokens = {tokens} tokens, whose routes through "
        f"{shape.layers} layers with {shape.taken} of {shape.experts} experts can make a record of {size:,} "
        f"bytes; on Kafka {LARGEST_RECORD:,} are the most. Lower them to {most} together, or set "
        "model.follow_routes: false"
    )
    return [problem]


def _sample_bytes(shape: RouteShape, tokens: int) -> int:
    """Return how many bytes the record of a sample can have, or a part's."""
    return shape.most_bytes(tokens) + _TOKEN_BYTES * tokens + _SAMPLE_BYTES


def _task_problems(spec: RunSpec) -> list[str]:
    task, found = spec.task, []
    if task.python:
        found += _function_problems("task.python", f"{task.python}:problems", "problems")
        if not task.reward:
            found += _function_problems("task.python", f"{task.python}:reward", "reward")
    if task.reward:
        found += _function_problems("task.reward", task.reward, "reward")
    for name in ("jsonl", "held_out_jsonl", "chat_template"):
        file = getattr(task, name)
        if file and not Path(file).is_file():
            found.append(f"task.{name}: there is no file {file}")
    return found


def _function_problems(field: str, where: str, usual: str) -> list[str]:
    """Check that a function exists. `where`: FILE.py:function or module:function; `usual`: its usual name."""
    source, colon, function = where.rpartition(":")
    if not colon or not function:
        return [f"{field}: {where!r} names no function: write it as FILE.py:{usual} or module:{usual}"]
    if source.endswith(".py"):
        file = Path(source)
        if not file.is_file():
            close = _near(file)
            return [f"{field}: there is no file {source}{f'; did you mean {close}?' if close else ''}"]
        return _missing_function(field, file, function)
    try:
        there = importlib.util.find_spec(source) is not None
    except (ImportError, ValueError):
        there = False
    return [] if there else [f"{field}: there is no module {source}, and no file of that name ends in .py"]


def _missing_function(field: str, file: Path, function: str) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        return [f"{field}: {file} can't be read as Python: {error}"]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = {name for node in ast.walk(tree) for name in _names_bound(node)} | set(functions)
    if function in names:
        return []
    close = difflib.get_close_matches(function, functions, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f" (it has: {', '.join(functions) or 'none'})"
    return [f"{field}: {file} has no function {function}(){hint}"]


def _names_bound(node: ast.AST) -> list[str]:
    """Return the names that an import or an assignment binds, for functions may come that way, too."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _near(file: Path) -> str | None:
    names = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
    close = difflib.get_close_matches(file.name, names, n=1)
    return str(file.parent / close[0]) if close else None
