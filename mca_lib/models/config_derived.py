"""What follows from the fields of `McaModelConfig`: sizes that weight tables name, layers that have a row. No torch."""

from mca_lib.models.hybrid.pattern import ATTENTION, LATENT, MAMBA, MLP


class Derived:
    """Mixed into `McaModelConfig`, whose fields these are."""

    @property
    def described(self) -> str:
        """What messages call the model: `a llama model`, `an olmo2 model`."""
        return f"{'an' if self.model_type[:1] in tuple('aeio') else 'a'} {self.model_type} model"

    @property
    def rotating_channels(self) -> int:
        """Channels of a head that rotate."""
        return self.rotary_channels or self.kv_channels

    # Sizes that the weight tables name.

    @property
    def query_size(self) -> int:
        """Rows of the query projection: heads x head size."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection."""
        return self.num_query_groups * self.kv_channels

    @property
    def gated_query_size(self) -> int:
        """Rows of a query projection that makes the gate of attention's output too."""
        return 2 * self.query_size if self.attention_output_gate else self.query_size

    @property
    def query_key_size(self) -> int:
        """Rows of the query projection of latent attention."""
        return self.num_attention_heads * self.latent_attention.qk_head_dim

    @property
    def key_value_up_size(self) -> int:
        """Rows of latent attention's projection to the keys' channels without position and to the values."""
        latent = self.latent_attention
        return self.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)

    @property
    def twice_hidden_size(self) -> int:
        """What a multi-token prediction layer projects: an embedding and a hidden state."""
        return 2 * self.hidden_size

    @property
    def gated(self) -> bool:
        """MLPs and experts have a gate."""
        return self.activation != "relu2"

    @property
    def untied(self) -> bool:
        """The output layer has a weight of its own."""
        return not self.tie_word_embeddings

    # Layers that a row of a weight table is for.

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.moe.layers if self.moe else ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense MLP."""
        if self.hybrid is not None:
            return self._layers_of(MLP)
        moe = set(self.moe_layers)
        return tuple(i for i in range(self.num_layers) if i not in moe)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with softmax attention."""
        if self.hybrid is not None:
            return self._layers_of(ATTENTION, LATENT)
        linear = set(self.linear_attention_layers)
        return tuple(i for i in range(self.num_layers) if i not in linear)

    @property
    def linear_attention_layers(self) -> tuple[int, ...]:
        return self.gated_delta_net.layers if self.gated_delta_net else ()

    @property
    def mamba_layers(self) -> tuple[int, ...]:
        return () if self.hybrid is None else self._layers_of(MAMBA)

    def _layers_of(self, *symbols: str) -> tuple[int, ...]:
        return tuple(i for i, symbol in enumerate(self.hybrid.pattern) if symbol in symbols)

    @property
    def stacked_layers(self) -> bool:
        """A checkpoint stores the layers as one tensor with a leading axis: they are all alike."""
        alike = len(self.moe_layers) in (0, self.num_layers) and not self.linear_attention_layers
        return self.hybrid is None and alike
