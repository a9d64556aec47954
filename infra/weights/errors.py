"""What can be wrong with weights. By itself: who only names the error need not import torch."""

from infra.errors import Explained


class WeightsError(Explained):
    """Weights that can't be used; the message names version, object and reason."""
