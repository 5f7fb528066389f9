"""The trainer: `fastvit-train` or `python -m fastvit.training`, alone or on many ranks.

    command_line, config    what a run is told: flags, a TOML file, defaults
    launch, distributed     who started the ranks, and what they say to each other
    datasets, cifar, image_folder, loaders
                            where batches come from, augmented
    model, conversion, optimization, precision, engine, train_state
                            what a step changes
    loop, signals           an epoch of training, and what may end it
    checkpoint, log         what a run leaves behind
    run                     all of it in order

Importing this package imports nothing heavy; scikit-learn, TensorBoard, tqdm and safetensors come with the
extra `train` (`pip install fastvit[train]`) and are imported when a run starts.
"""
