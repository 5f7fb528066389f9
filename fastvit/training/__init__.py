"""The trainer: `fastvit-train` or `python -m fastvit.training`, alone or on many ranks.

    command_line, config    options: flags, a TOML file, defaults
    launch, distributed     launchers, process group, messages between ranks
    datasets, image_folder, loaders
                            images, augmentation, batches
    model, nvidia_apex      the model and its weights; NVIDIA apex's layers
    train_state             the state that a step changes
    loop                    one epoch of training; what ends it on all ranks
    checkpoint, log         the files of a run, and its lock
    run                     a run from start to end

scikit-learn, TensorBoard, tqdm and safetensors come with the extra `train` (`pip install '.[train]'`).
They are imported when a run starts, not with this package.
"""
