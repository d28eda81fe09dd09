"""LoRA (Hu et al. 2021): the base's weights are frozen, small matrices beside its linear layers train.

`attach` puts adapters beside the linear layers of a built model, by forward hooks: the base's modules stay what they
are. One adapter per Hugging Face module (q_proj, k_proj, ...), under its name, whatever Megatron fuses. `adapter` is
the arithmetic, `parallel` how it is cut over ranks, `merge` what engines and exports get, `checkpoint` what is saved,
`peft_format` the adapter as other libraries read it, `weights` the host copies.
"""
