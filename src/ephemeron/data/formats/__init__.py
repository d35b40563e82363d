"""Published file formats that job sources and the catalogue both read: CIFAR and IDX."""
