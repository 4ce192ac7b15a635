"""Hybrid models: attention, MLP and state space (Mamba-2) layers in the order that a pattern writes.

A pattern has one symbol per layer, as in Megatron-Core: `M` Mamba-2, `*` attention, `-` MLP, `E` mixture of experts.
`pattern` knows them without torch; a transformer layer is `*-` (or `*E`), which is how a hybrid starts from one.
"""
