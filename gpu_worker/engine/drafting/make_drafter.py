"""The drafter of an engine, by what was loaded beside its model."""

from gpu_worker.engine.drafting.costs import ProposalCosts
from gpu_worker.engine.drafting.draft_eagle import EagleSource
from gpu_worker.engine.drafting.draft_heads import HeadSource
from gpu_worker.engine.drafting.draft_model import ModelSource
from gpu_worker.engine.drafting.draft_sampler import DraftSampler
from gpu_worker.engine.drafting.drafter import Drafter, DraftSource
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.sampling.grammar import Matchers


def make_drafter(loaded: LoadedModel, matchers: Matchers, costs: ProposalCosts) -> Drafter | None:
    """None if no model proposes tokens."""
    draft = loaded.draft
    if draft is None:
        return None
    sampler = DraftSampler(matchers, loaded.vocab_size)
    source = make_source(draft, loaded, sampler) if draft.model else None
    return Drafter(draft.method, draft.num_tokens, source, costs)


def make_source(draft: Draft, loaded: LoadedModel, sampler: DraftSampler) -> DraftSource:
    if draft.cached and draft.recorded:
        return EagleSource(draft.cached, sampler, draft.recorded, draft.max_states)
    if draft.cached:
        return ModelSource(draft.cached, sampler)
    return HeadSource(draft, loaded, sampler)
