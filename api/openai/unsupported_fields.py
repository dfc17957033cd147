"""Fields of OpenAI's, vLLM's and TGI's requests that the OpenAI routes refuse by name."""

from api.http.body import UnsupportedFields

UNSUPPORTED: UnsupportedFields = {
    "audio": (),
    "chat_template": (),
    "documents": (),
    "ec_transfer_params": (),
    "grammar": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "watermarking": (False,),
    "web_search_options": (),
}
TGI_FIELDS = frozenset(
    {
        "adapter_id",
        "decoder_input_details",
        "details",
        "do_sample",
        "max_new_tokens",
        "min_new_tokens",
        "return_full_text",
        "top_n_tokens",
        "truncate",
        "watermark",
    }
)
"""Parameters that only TGI's routes have."""
