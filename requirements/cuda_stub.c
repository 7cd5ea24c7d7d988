/* Stands in for CUDA's driver library where there is none. NIXL's LIBFABRIC plugin links to it; with
 * memory of the host alone it only asks whether there is a device. 100 is CUDA_ERROR_NO_DEVICE. */

int cuInit(unsigned int flags) { return 100; }
int cuCtxSetCurrent(void *context) { return 100; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { return 100; }
int cuPointerGetAttributes(unsigned int count, void *attributes, void **data,
                           unsigned long long pointer) {
  return 100;
}
