"""The task: write the word of the prompt and three numbers, and stop. `kzm:` asks for, say, `kzm 07 41 05`.

Two functions are all that StreamRL needs. They import nothing of it.
"""

import random
import string


def problems(split):
    """Yield the problems of a split: "train", or "held_out" for evaluations. Always the same ones."""
    rng = random.Random(split)
    first = string.ascii_lowercase[:13] if split == "train" else string.ascii_lowercase[13:]
    for number in range(1000):
        word = rng.choice(first) + "".join(rng.choices(string.ascii_lowercase, k=2))
        # `id` and `prompt` are needed; anything else is for the reward
        yield {"id": f"{split}-{number}", "prompt": f"{word}:", "word": word}


def reward(problem, completion):
    """Return a number, or named parts that add up: each part gets a curve of its own."""
    words = completion.split(" ")
    return {
        "word": 0.2 * (words[0] == problem["word"]),
        "three": 0.8 / (1 + abs(len(words) - 4)),
    }
