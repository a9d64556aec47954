"""Figures of the StreamRL paper (arXiv 2504.15930), read off its pictures to about 2 %."""

from __future__ import annotations

from typing import Any

MODELS = ("7B", "32B", "72B")
GPUS = {"7B": 32, "32B": 64, "72B": 128}
BATCH = 1024
LONGEST = (5_000, 10_000, 20_000)

# Table 2 and the models' public configs (the paper prints 8 key-value heads for 7B; the public model has 4)
CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "qwen2", "_name_or_path": f"Qwen2.5-{name}", "vocab_size": vocab,
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
    }
    for name, layers, hidden, heads, kv_heads, intermediate, vocab in (
        ("7B", 28, 3584, 28, 4, 18944, 152064),
        ("32B", 64, 5120, 40, 8, 27648, 152064),
        ("72B", 80, 8192, 64, 8, 29568, 152064),
    )
}  # fmt: skip

# Figure 8: samples/s of ColocationRL, StreamRL-Sync, StreamRL-Async, by longest answer and model
THROUGHPUT = {
    ("7B", 5_000): (12.93, 16.00, 21.27),
    ("32B", 5_000): (5.94, 6.66, 7.66),
    ("72B", 5_000): (4.02, 5.84, 7.28),
    ("7B", 10_000): (8.00, 8.81, 10.63),
    ("32B", 10_000): (2.92, 3.26, 3.74),
    ("72B", 10_000): (2.40, 3.02, 3.69),
    ("7B", 20_000): (4.79, 5.05, 5.70),
    ("32B", 20_000): (1.84, 2.13, 2.44),
    ("72B", 20_000): (1.49, 1.84, 2.23),
}

# Table 3: 72B, 20K; over colocated
BREAKDOWN = {"skewness": 1.08, "disaggregated": 1.23, "async": 1.48}

# Figure 9: seconds of generation over random FIFO's, 20K: by the ranker, by true lengths
SKEWNESS = {"7B": (0.90, 0.81), "32B": (0.82, 0.67), "72B": (0.79, 0.69)}

# Figure 10: share of the GPUs that generate, and what that gains over halves
SPLITS = {"32B": (40 / 64, 1.24), "72B": (80 / 128, 1.19)}

# Figure 11: 7B, from 10K to 20K, 32 GPUs at first
GROWN = (32, 40, 48, 56)

# Figure 12: throughput by cost, 32 H20 + 16 H800 over 32 H800
COST_RATIO = {5_000: 1.27, 10_000: 1.32, 20_000: 1.24}

# Figure 2, 7B: generation and training by GPUs, and by longest answer, each over the first
BY_GPUS = {8: (1.00, 1.00), 16: (0.81, 0.54), 24: (0.74, 0.30), 32: (0.69, 0.19)}
BY_LENGTH = {1_000: (1.0, 1.0), 2_000: (1.9, 1.6), 4_000: (3.75, 2.75), 8_000: (8.0, 5.0)}

# Figure 6: 7B on one H800 by vLLM, milliseconds of a step by batch
STEP_MS = {1: 8.4, 2: 8.8, 4: 8.9, 8: 9.0, 16: 9.4, 32: 10.2, 64: 11.7, 128: 15.3, 256: 21.5, 512: 36.9}
