"""PULSESync: lossless weight synchronisation from a trainer to inference, over any object store or process group."""
