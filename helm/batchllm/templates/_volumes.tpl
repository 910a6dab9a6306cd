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
{{- with .Values.pods.extraVolumes }}
{{ toYaml . }}
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
{{- include "batchllm.extraVolumeMounts" . }}
{{- end -}}

{{/* The mounts of extraVolumes; fails where a pod would be refused: the API server sees the template hours later. */}}
{{- define "batchllm.extraVolumeMounts" -}}
{{- $names := list "shm" "scratch" "cache" "work" "spark-local-dir-1" -}}
{{- $paths := list "/dev/shm" "/tmp" "/cache" "/opt/spark/work-dir" "/var/data/spark" -}}
{{- if .Values.modelCache.enabled -}}
{{- $names = append $names "models" -}}
{{- $paths = append $paths "/models" -}}
{{- end -}}
{{- $own := list -}}
{{- range .Values.pods.extraVolumes -}}
{{- if has .name (concat $names $own) -}}
{{- fail (printf "pods.extraVolumes: %s is the name of another volume; choose another" .name) -}}
{{- end -}}
{{- $own = append $own .name -}}
{{- end -}}
{{- range .Values.pods.extraVolumeMounts -}}
{{- if not (has .name $own) -}}
{{- fail (printf "pods.extraVolumeMounts: %s isn't in pods.extraVolumes" .name) -}}
{{- end -}}
{{- $path := trimSuffix "/" .mountPath -}}
{{- if has $path $paths -}}
{{- fail (printf "pods.extraVolumeMounts: another volume is mounted at %s; choose another mountPath" $path) -}}
{{- end -}}
{{- $paths = append $paths $path -}}
{{- end -}}
{{- with .Values.pods.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
