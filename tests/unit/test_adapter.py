"""LoRA: the trainer's adapter against plain peft, and what generators make of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, load_file, save, save_file
from transformers import AutoModelForCausalLM

from consumers.batches.micro_batches import plan
from consumers.learners import forward
from consumers.learners.learner import TorchLearner
from consumers.losses.loss import loss_of
from infra import cpu_linear
from infra.stores.opening import open_store
from infra.weights.adapter_tensors import Merging, layers_of, names_of
from infra.weights.bits import Bits
from infra.weights.digest import digests_of, model_digests, root_digest
from infra.weights.expected import Expected
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from producers.installing import Newest, VerifiedWeights
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.training import rows_of

KINDS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def lora_spec(lora: dict[str, Any] | None = None, **sections: Any) -> RunSpec:
    model = {"lora": {"rank": 4, "alpha": 6.0, **(lora or {})}, **sections.pop("model", {})}
    return make_spec(model=model, **sections)


def some_adapter(learner: TorchLearner, seed: int = 0, size: float = 0.3) -> dict[str, torch.Tensor]:
    """As if it had been trained: B is no longer 0."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: size * torch.randn(tensor.shape, generator=noise) for name, tensor in learner.weights().items()
    }


def trained(learner: TorchLearner, spec: RunSpec, steps: int = 1) -> None:
    rows = rows_of(spec)
    for _ in range(steps):
        (scored,) = learner.score([rows], learner.loss.needs)
        learner.accumulate(plan(scored, loss_of(spec), 64, 0).batches)
        learner.step(loss_of(spec).total([row.sample for row in rows]))


def plain_peft(model: str, adapter: dict[str, torch.Tensor], spec: RunSpec, folder: Path) -> Any:
    """The adapter read by peft from the file that we publish."""
    lora = spec.model.lora
    assert lora is not None
    LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=KINDS, task_type="CAUSAL_LM", inference_mode=False
    ).save_pretrained(str(folder))
    save_file(adapter, str(folder / "adapter_model.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True)


@pytest.fixture(params=["torch", "onednn"])
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As this machine computes, and as those do whose layers are replaced."""
    monkeypatch.setattr(cpu_linear, "pays", lambda: request.param == "onednn")
    monkeypatch.setattr(forward, "_WARM_ROWS", 8)
    yield


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_is_that_of_plain_peft(
    model: str, tmp_path: Path, linear: None, checkpointing: bool
) -> None:
    """Sample by sample, from the formula of GRPO, without batches, packing or our own layers."""
    spec = lora_spec(
        algorithm={"max_grad_norm": 1e9},
        sampling={"temperature": 0.8},
        trainer={"logits_chunk": 16, "gradient_checkpointing": checkpointing},
    )
    learner, rows, loss = TorchLearner(model, spec), rows_of(spec), loss_of(spec)
    adapter = some_adapter(learner)
    learner.adopt(adapter)
    learner.accumulate(plan(rows, loss, 64, 0).batches)
    norm = learner.step(total := loss.total([row.sample for row in rows])).norm
    net = plain_peft(model, adapter, spec, tmp_path)
    for row, advantage in zip(rows, [float(one[0]) for one in loss.advantages(rows)], strict=True):
        sample = row.sample
        tokens = torch.tensor([*sample.prompt_tokens, *sample.tokens], dtype=torch.long)
        first = sample.prompt_tokens.size
        logits = net(input_ids=tokens[None]).logits[0, first - 1 : -1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, tokens[first:, None])[:, 0]
        ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        (-loss.weight(sample.true_length) * gain / total).backward()
    expected = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
    }
    assert set(expected) == set(adapter)
    state = learner.state()
    for name, gradient in expected.items():
        found = state[f"optimizer.exp_avg.{name}"] / (1 - spec.algorithm.betas[0])
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-6)
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert norm == pytest.approx(float(size), rel=1e-4)


def test_only_the_adapter_is_trained_published_and_kept(model: str) -> None:
    spec = lora_spec()
    learner = TorchLearner(model, spec)
    before = {name: value.clone() for name, value in learner._model.state_dict().items()}
    first = learner.weights()
    trained(learner, spec, 3)
    after = learner._model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora_" in name for name in changed)
    layers = [
        f"model.layers.{n}.{'mlp' if kind[0] in 'dgu' else 'self_attn'}.{kind}"
        for n in (0, 1) for kind in KINDS
    ]  # fmt: skip
    assert layers_of(learner.weights()) == sorted(layers)
    assert all(not first[names_of(layer)[1]].any() for layer in layers), "it begins as the base"
    whole = sum(value.numel() for name, value in before.items() if "lora_" not in name)
    kept = sum(value.numel() for value in learner.state().values())
    assert sum(value.numel() for value in learner.weights().values()) * 3 < kept < whole


def test_every_start_begins_with_the_same_adapter_and_leaves_the_dice_alone(model: str) -> None:
    torch.manual_seed(1)
    one = TorchLearner(model, lora_spec())
    dice = torch.get_rng_state()
    torch.manual_seed(2)
    other = TorchLearner(model, lora_spec())
    assert digests_of(one.weights()) == digests_of(other.weights())
    assert digests_of(one.weights()) != digests_of(TorchLearner(model, lora_spec(seed=8)).weights())
    torch.manual_seed(1)
    TorchLearner(model, lora_spec())
    assert torch.equal(torch.get_rng_state(), dice)


def test_targets_choose_layers_and_wrong_ones_are_named(model: str) -> None:
    layers = layers_of(TorchLearner(model, lora_spec({"targets": ["q_proj", "1.mlp.up_proj"]})).weights())
    assert layers == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    with pytest.raises(WeightsError, match=r"no linear layer 'q_prj' below its head; did you mean 'q_proj'"):
        TorchLearner(model, lora_spec({"targets": ["q_prj"]}))
    with pytest.raises(WeightsError, match=r"no linear layer 'lm_head' below its head \(it has: down_proj, "):
        TorchLearner(model, lora_spec({"targets": ["lm_head"]}))


def test_restored_state_goes_on_with_the_same_bits(model: str) -> None:
    spec = lora_spec(algorithm={"warmup_steps": 3})
    straight, before, after = (TorchLearner(model, spec) for _ in range(3))
    trained(straight, spec, 4)
    trained(before, spec, 2)
    after.restore({name: value.clone() for name, value in load(save(before.state())).items()})
    trained(after, spec, 2)
    assert digests_of(after.weights()) == digests_of(straight.weights())


def test_a_checkpoint_of_another_base_is_refused(model: str, tmp_path: Path) -> None:
    other = TorchLearner(str(make_tiny_model(tmp_path, seed=5)), lora_spec())
    with pytest.raises(WeightsError, match="the checkpoint is of an adapter for a model with root"):
        TorchLearner(model, lora_spec()).restore(other.state())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_model_without_the_adapter(model: str, dtype: str) -> None:
    spec = lora_spec(loss={"kl": 0.1}, model={"dtype": dtype})
    learner, rows = TorchLearner(model, spec), rows_of(spec)
    learner.adopt(some_adapter(learner))
    whole = TorchLearner(model, make_spec(loss={"kl": 0.1}, model={"dtype": dtype}))
    for _ in range(2):  # it is switched on again: training goes on
        (scored,) = learner.score([rows], learner.loss.needs)
        for one, other in zip(scored, whole.score([rows], whole.loss.needs)[0], strict=True):
            assert (one.scores.reference == other.scores.reference).all()  # type: ignore[union-attr]
        trained(learner, spec)


def test_another_reference_is_a_model_of_its_own(model: str, tmp_path: Path) -> None:
    other = str(make_tiny_model(tmp_path, seed=5))
    loss = {"kl": 0.1, "reference": other}
    learner, whole = TorchLearner(model, lora_spec(loss=loss)), TorchLearner(model, make_spec(loss=loss))
    rows = rows_of(lora_spec())
    pairs = zip(*(each.score([rows], each.loss.needs)[0] for each in (learner, whole)), strict=True)
    assert all((one.scores.reference == two.scores.reference).all() for one, two in pairs)  # type: ignore[union-attr]


def test_the_adapter_that_an_iteration_began_with_is_kept(model: str) -> None:
    spec = lora_spec(loss={"correction": "decoupled"}, algorithm={"optimizer_steps": 2})
    learner, rows = TorchLearner(model, spec), rows_of(spec)

    def said() -> list[float]:
        return [float(row.scores.before.sum()) for row in learner.score([rows], learner.loss.needs)[0]]  # type: ignore[union-attr]

    learner.begin_iteration()
    bits = digests_of(learner.weights())
    first = said()
    assert digests_of(learner.weights()) == bits, "looking back changes nothing"
    trained(learner, spec)
    trained(learner, spec)
    assert said() == first
    now = digests_of(learner.weights())
    learner.begin_iteration()
    assert said() != first and digests_of(learner.weights()) == now != bits


def test_the_critic_has_an_adapter_too(model: str) -> None:
    spec = lora_spec(loss={"kind": "ppo", "value_learning_rate": 3e-2})
    learner = TorchLearner(model, spec)
    assert learner._critic is not None
    names = set(learner._critic.trained.named)
    assert {"value_head.weight", "value_head.bias"} < names
    assert all("lora_" in name for name in names if not name.startswith("value_head."))
    before = digests_of(learner._critic.trained.parts()[0])
    trained(learner, spec, 2)  # the first step moves the head, which began with 0
    after = digests_of(learner._critic.trained.parts()[0])
    assert all(before[f"weights.{n}"] != after[f"weights.{n}"] for n in names if "lora_A" not in n)


def merged(model: str, adapter: dict[str, torch.Tensor], spec: RunSpec) -> dict[str, torch.Tensor]:
    merging = Merging(spec.model, ModelFolder(model))
    return {f"{layer}.weight": merging.merged(layer, adapter) for layer in layers_of(adapter)}


def test_merged_layers_are_those_of_peft(model: str, tmp_path: Path) -> None:
    spec = lora_spec()
    adapter = some_adapter(TorchLearner(model, spec))
    expected = plain_peft(model, adapter, spec, tmp_path).merge_and_unload().state_dict()
    found = merged(model, adapter, spec)
    assert len(found) == 14
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
        assert not torch.equal(tensor, ModelFolder(model).tensor(name))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert digests_of(merged(model, adapter, spec)) == digests_of(found)
    finally:
        torch.set_num_threads(threads)
    rounded = merged(model, adapter, lora_spec(model={"dtype": "bfloat16"}))
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in found.items())


def test_a_new_adapter_makes_the_base_bit_by_bit(model: str) -> None:
    spec = lora_spec()
    found = merged(model, TorchLearner(model, spec).weights(), spec)
    assert all(torch.equal(found[name], ModelFolder(model).tensor(name)) for name in found)


def published(folder: Path, learner: TorchLearner, version: int, base: str | None = "") -> WeightStore:
    weights = WeightStore(open_store(f"file://{folder}"), "r-1")
    base = learner.base if base == "" else base
    weights.publish(version, learner.weights(), trainer_epoch=0, base=base)
    return weights


def installable(weights: WeightStore, number: int, spec: RunSpec, model: Path | str) -> VerifiedWeights:
    """As a new generator gets it."""
    return Newest(spec.model, ModelFolder(model), spec.generator).version(*weights.update(None, number))


def digests_in(version: VerifiedWeights) -> dict[str, str]:
    """What a new engine holds then."""
    found: dict[str, Bits] = {}
    version.patch.read().apply(found)
    return model_digests(found)


def test_a_generator_takes_whole_layers_and_only_of_its_base(model: str, tmp_path: Path) -> None:
    spec = lora_spec({"targets": ["q_proj", "down_proj"]})
    learner = TorchLearner(model, spec)
    learner.adopt(some_adapter(learner))
    weights = published(tmp_path, learner, 1)
    manifest = weights.manifest(1)
    version = installable(weights, 1, spec, model)
    expected = digests_of(merged(model, learner.weights(), spec))
    assert version.digests == digests_in(version) == expected
    rounded = lora_spec({"targets": ["q_proj", "down_proj"]}, model={"dtype": "bfloat16"})
    half = installable(weights, 1, rounded, model)
    assert half.digests == digests_in(half) == digests_of(merged(model, learner.weights(), rounded))
    assert version.root == manifest.root == root_digest(digests_of(learner.weights()))
    assert manifest.base == ModelFolder(model).root

    other = make_tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(
        WeightsError, match=r"version 1 of run r-1 is an adapter for a model with root .* in .*other"
    ):
        installable(weights, 1, spec, other)
    with pytest.raises(WeightsError, match=r"is an adapter, but the run has no model\.lora"):
        installable(weights, 1, make_spec(), model)
    whole = TorchLearner(model, make_spec())
    published(tmp_path, whole, 2)
    with pytest.raises(WeightsError, match=r"is a whole model, but the run has model\.lora"):
        installable(weights, 2, spec, model)
    with pytest.raises(WeightsError, match="this trainer started from another model"):
        published(tmp_path, learner, 1, base="ff")


def test_what_is_no_adapter_is_said(model: str) -> None:
    spec = lora_spec()
    adapter = some_adapter(TorchLearner(model, spec))
    a, b = names_of("model.layers.0.mlp.up_proj")
    with pytest.raises(WeightsError, match="not the tensors of an adapter: x"):
        layers_of([a, b, "x"])
    with pytest.raises(WeightsError, match="not the tensors of an adapter"):
        layers_of([a])
    with pytest.raises(
        WeightsError, match=r"the adapter of model\.layers\.0\.mlp\.up_proj makes 3 × 64; the"
    ):
        merged(model, {**adapter, b: torch.zeros(3, 4)}, spec)
    with pytest.raises(WeightsError, match=r"has no tensor model\.layers\.9\.x\.weight"):
        ModelFolder(model).tensor("model.layers.9.x.weight")


def test_a_folder_in_several_files_is_the_same_model(model: str, tmp_path: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.save_pretrained(tmp_path, max_shard_size="100KB")
    split, single = ModelFolder(tmp_path), ModelFolder(model)
    assert len(split.files) > 2 and (split.root, split.shapes) == (single.root, single.shapes)
    assert single.root == root_digest(digests_of(load_file(f"{model}/model.safetensors")))
    assert all(torch.equal(split.tensor(name), single.tensor(name)) for name in single.names)


def test_folders_that_can_not_be_a_base_are_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no model\.safetensors: save the model with save_pretrained"):
        _ = ModelFolder(tmp_path).root
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read: .* does not lie in the file"):
        _ = ModelFolder(damaged).root
    file.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read"):
        _ = ModelFolder(damaged).shapes


def test_peft_gives_the_names_that_we_publish(model: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(target_modules="all-linear", r=4)).save_pretrained(str(tmp_path))
    theirs = load_file(str(tmp_path / "adapter_model.safetensors"))
    ours = TorchLearner(model, lora_spec()).weights()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_a_version_of_another_model_is_refused_before_it_is_fetched(model: str, tmp_path: Path) -> None:
    base = ModelFolder(model)
    url, bits = f"file://{tmp_path}", base.bits()
    published = WeightStore(open_store(url), "r-1")
    name = next(name for name in bits if name.endswith("q_proj.weight"))
    wide = Bits(bits[name].dtype, (1, *bits[name].shape), bits[name].data)
    large = {f"{n}.{name}": bits[name] for n in range(200)}
    tied = {**bits, "lm_head.weight": bits["model.embed_tokens.weight"]}
    for version, some in enumerate((bits, tied, {**bits, name: wide}, {**bits, **large})):
        published.publish_model(version, some)
    reader = WeightStore(open_store(url), "r-1", check=Expected(make_spec().model, base).check)
    assert reader.manifest(0) and reader.manifest(1)
    with pytest.raises(WeightsError, match=rf"version 2 of run r-1 is of another model: {name} is \[1, 64"):
        reader.manifest(2)
    with pytest.raises(
        WeightsError, match=r"version 3 of run r-1 says that it has .* bytes; of the model in"
    ):
        reader.manifest(3)


def test_an_adapter_of_another_model_is_refused_before_it_is_fetched(model: str, tmp_path: Path) -> None:
    base, spec = ModelFolder(model), lora_spec()
    store = open_store(f"file://{tmp_path}")
    layer = next(name for name in base.names if name.endswith("q_proj.weight")).removesuffix(".weight")
    a, b = names_of(layer)
    whole = base.shapes[f"{layer}.weight"]
    for version, rank in enumerate((4, 5)):
        tensors = {a: torch.zeros(rank, whole[1]), b: torch.zeros(whole[0], rank)}
        WeightStore(store, "r-1").publish(version, tensors, trainer_epoch=0, base=base.root)
    reader = WeightStore(store, "r-1", check=Expected(spec.model, base).check)
    assert reader.manifest(0)
    with pytest.raises(WeightsError, match="version 1 of run r-1 is of another model"):
        reader.manifest(1)
