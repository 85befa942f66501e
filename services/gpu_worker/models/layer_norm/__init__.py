"""Dense families with LayerNorm, most with biases, learned positions or a parallel residual."""
