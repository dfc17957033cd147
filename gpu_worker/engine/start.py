"""Start of an engine: which one a model needs, by its files."""

from common import model_files
from common.pooling import read_pooling
from common.settings.settings import Settings
from gpu_worker.engine.drafting.load_draft import load_draft
from gpu_worker.engine.encoder.engine import EncoderEngine
from gpu_worker.engine.encoder.model import EncoderModel, load_encoder
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.load import choose_device, choose_dtype, load, name_of
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.parallel.communicator import Communicator


def load_model(
    settings: Settings, progress: model_files.Progress, communicator: Communicator
) -> LoadedModel | EncoderModel:
    """Load the model: an encoder, or a decoder. Raises SettingError."""
    dtype = name_of(choose_dtype(settings.dtype, choose_device(settings.device, communicator.info)))
    path = model_files.resolve(settings.model_id, settings.revision, progress, dtype=dtype)
    pooling = read_pooling(path, settings)
    if pooling is not None and pooling.is_encoder:
        return load_encoder(settings, path, pooling, progress, communicator)
    return load(settings, progress, communicator, load_draft)


def make_engine(
    settings: Settings,
    progress: model_files.Progress,
    communicator: Communicator,
    loaded: LoadedModel | EncoderModel | None,
) -> Engine | EncoderEngine:
    """The engine of the model, which is loaded if `loaded` is None. Raises SettingError."""
    loaded = loaded or load_model(settings, progress, communicator)
    if isinstance(loaded, EncoderModel):
        return EncoderEngine(settings, progress, loaded)
    return Engine(settings, progress, communicator, loaded)
