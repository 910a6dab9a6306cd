{{/* Volumes of pods, and where they are mounted. */}}

{{- define "batchllm.volumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.pods.shm.sizeLimit | quote }}
- name: scratch
  emptyDir:
    sizeLimit: {{ .Values.pods.scratch.sizeLimit | quote }}
- name: cache
{{- if .Values.pods.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.pods.cache.existingClaim | quote }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.pods.cache.sizeLimit | quote }}
{{- end }}
{{- if .Values.modelCache.enabled }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "batchllm.modelClaimName" . | quote }}
{{- end }}
{{- end -}}

{{- define "batchllm.volumeMounts" -}}
- name: shm
  mountPath: /dev/shm
- name: scratch
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if .Values.modelCache.enabled }}
- name: models
  mountPath: /models
  readOnly: {{ .Values.modelCache.readOnly }}
{{- end }}
{{- end -}}
