"""Multi-head latent attention (MLA), the attention of DeepSeek and Kimi models.

`latent_attention.LatentAttention` is the sublayer; families of `models/` make it. `up_projection.UpProjection` is the
matrix that makes K and V. `attention/` decides where the
up-projections of K and V are applied. Imports the other layers.
"""
