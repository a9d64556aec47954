"""The facts that a server of vLLM says of itself, and the limits of what it is sent and sends.

Both ends import this file: the generator's engine, and the part of StreamRL that runs in the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from infra.boot_id import boot_id

CONTRACT = 3  # of the two ends; another number is refused
BACKEND = "streamrl"  # the name in the server's --weight-transfer-config
ID_PREFIX = "generate-tokens-"  # vLLM puts it before a request's id
FILE_AWAY = "the patch's file can't be opened here"  # said by a worker
CLAIM_PATH, RELEASE_PATH = "/streamrl/claim", "/streamrl/release"
FACTS_PATH, PATCH_PATH = "/streamrl/facts", "/streamrl/patch"
CLAIM_HEADER = "X-StreamRL-Claim"  # of all requests that change a server
DIGEST_BYTES = 32  # of the hash behind a patch
SENDER_SILENT_S = 30.0  # after which a sender is taken to be gone that has more to send
CLAIM_S = 15.0  # for which a server belongs to the generator that was heard last
CLAIM_AGAIN_S = 3.0  # how often that generator is heard


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a running server, as far as samples depend on them.

    Facts that a later contract has added have defaults. So those of an older server can be read, and it is
    refused by the number of its contract.
    """

    contract: int
    machine: str  # another one on another machine, or in another container
    vllm: str
    device: str
    dtype: str
    front_ends: int  # processes that answer HTTP
    workers: int  # of tensor, pipeline and data parallelism together
    ranks: int  # of tensor parallelism
    whole_experts: bool = False  # whether these ranks divide experts, and not each one's tensors
    vocabulary: int
    longest: int  # tokens of prompt and answer
    slots: int
    logprobs_mode: str
    prefix_caching: bool
    chunked_prefill: bool
    priorities: bool
    quantization: str
    adapters: bool
    speculation: bool
    transfers: bool  # whether it takes patches of weights
    counts_tokens: bool  # whether it can say how many tokens it has drawn
    config: dict[str, Any]  # of the model, as transformers has it
    cache_dtype: str = "auto"  # of keys and values, as --kv-cache-dtype has it; auto: the model's
    offloads: bool = False  # whether it holds weights in main memory
    unfit_experts: str = ""  # why a mixture's experts can't be verified; empty: they can, or there are none


class WeightsState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a server's weights."""

    root: str | None  # of those that it computes with
    prepared: str | None  # the root of those that can be installed
    digests: dict[str, str] | None  # of all tensors; None: they are being hashed
    error: str = ""  # the reason why weights could not be prepared or hashed


def this_machine() -> str:
    """Return a name that two processes share if each sees the other's files below /proc."""
    return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"


def answer_to(kind: type[msgspec.Struct], said: object) -> Any:
    """Return a worker's answer as a message. Raises msgspec.ValidationError if it is none."""
    return msgspec.convert(said, kind)
