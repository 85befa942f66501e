"""How a model makes vectors, scores or classes of hidden states: what its folder, the flags and a request say.

- `sentence_modules`: modules.json of sentence-transformers and the folders of its modules -> `SentenceModules`.
- `sentence_settings`: prompts, similarity and text length beside it -> `SentenceSettings`.
- `pooler_config`: --override-pooler-config -> `PoolerOverrides`.
- `pooling_choice`: the precedence of these -> `PoolingChoice`, which a worker builds its pooler of.
- `task_choice`: --task, --runner, --convert, or what the folder is for.
- `pooling_fields`: settings of services that follow, `pooling_card`: what gateways are told.
- `pair_templates`: how a reranker that is a language model reads a query and a document.
- `activations`: the function of scores that config.json names.

`modes.PoolingMode` names what all of them choose among. Nothing here imports torch: the launcher, the gateway and the
worker read the same folder. Imports go to `shared/config/checkpoint`, `shared/messages` and `shared/errors`.
"""
