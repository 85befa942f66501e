"""Mixtures of experts as the feed-forward sublayer of a model.

- `routed_experts.RoutedExperts`: a router, its experts, and shared experts that every row has. Families make it.
- `expert_weights`: the weights of a layer's experts, and how checkpoints store them.
- `expert_matrices`: products of all experts as layers that adapters change; `adaptable_experts` multiplies them in
  steps with adapters, on a GPU. On the CPU each expert has linear layers.
- `spread_experts.SpreadExperts`: brings rows of all replicas to the ranks that have their experts, and their sums back.
- `expert_places`: which rank has which expert, if ranks have them whole, and where on this rank.
- `grouped_experts`: the products of the experts on a GPU; `expert_products` has the kernels of a weight's form.
  `expert_configs` lists their tile sizes, of which
  `linear_tuning.expert_tuner` measures the fastest.
"""
