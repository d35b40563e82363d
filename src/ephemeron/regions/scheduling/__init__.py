"""How much of each region's devices a run uses. Pure: no module here starts or measures anything."""
