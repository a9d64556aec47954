"""What can be wrong with weights. By itself: who only names the error need not import torch."""


class WeightsError(RuntimeError):
    """Weights that can't be used; the message names version, object and reason."""
