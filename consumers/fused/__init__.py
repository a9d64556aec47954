"""Operations of a model in one pass over their data each, on GPUs: norms, gates, rotations, logprobs."""
