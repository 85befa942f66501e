"""Adapters in the memory of a device.

- `adapter_pages`: which adapter has which pages of the memory, and where matrices lie in them.
- `place_sizes`: what a place must hold at most.
- `packed_adapter` moves the matrices of an adapter into host memory that the device copies from, page by page, and
  writes down where each one begins.
- `packed_form`: the same for adapters with the modules and shapes of an earlier one, without a look at each matrix.
- `device_places.DevicePlaces` has the places, into which it copies adapters on a stream beside that of the steps.
- `device_products` adds the products of adapters to those of layers: it calls kernels with the tables of a layer.

Nothing here knows which device it is: kernels and the link to the device's memory are arguments.
"""
